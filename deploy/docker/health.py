"""Whether the server of this container serves: exit code 0 where grpc.health.v1 says SERVING. Optional: its port."""

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main() -> int:
    port = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("QUIRE_PORT", "50051")
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=4)
        except grpc.RpcError as error:
            print(error.code().name, error.details())  # noqa: T201 - `docker inspect` shows it
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))  # noqa: T201
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
