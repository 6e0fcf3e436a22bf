"""Checks whether this container's server serves: exit code 0 where grpc.health.v1 says SERVING.

Arguments are the port, and the name of a service: `liveness` is SERVING as long as the process answers. With
QUIRE_TLS_CERT it asks by TLS and trusts the server's own certificate, without a look at its signer.
"""

import os
import socket
import ssl
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

HOST = "127.0.0.1"
SECONDS = 4.0


def main() -> int:
    port = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("QUIRE_PORT", "50051")
    asked = health_pb2.HealthCheckRequest(service=sys.argv[2] if len(sys.argv) > 2 else "")
    try:
        with open_channel(int(port), os.environ.get("QUIRE_TLS_CERT")) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=SECONDS)
    except grpc.RpcError as error:
        print(error.code().name, error.details())  # noqa: T201 - `docker inspect` shows it
        return 1
    except OSError as error:
        print("UNAVAILABLE", error)  # noqa: T201
        return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))  # noqa: T201
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def open_channel(port: int, certificate: str | None) -> grpc.Channel:
    """Opens a channel to this container's server. certificate: the server's, PEM; None without TLS. Raises OSError."""
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if certificate is None:
        return grpc.insecure_channel(f"{HOST}:{port}", options)
    options.append(("grpc.ssl_target_name_override", name_of(port, certificate)))
    trusted = grpc.ssl_channel_credentials(Path(certificate).read_bytes())
    return grpc.secure_channel(f"{HOST}:{port}", trusted, options)


def name_of(port: int, certificate: str) -> str:
    """Returns a host name of the server's certificate. Raises OSError, ssl.SSLError among them."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False  # the name is the question; the certificate has to be the one of the file
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((HOST, port), timeout=SECONDS) as connection,
        context.wrap_socket(connection) as wrapped,
    ):
        shown = wrapped.getpeercert() or {}
    names = [name for kind, name in shown.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    return str(names[0]).replace("*", "health") if names else HOST


if __name__ == "__main__":
    sys.exit(main())
