"""The token of a Ray cluster. A process that has it can run anything on every node."""

from collections.abc import Mapping
from pathlib import Path

from rpc.private_files import read_token


def find_token(given: str | None, environment: Mapping[str, str]) -> str:
    """Finds the file with the token.

    Args:
        given: Path that the operator gives; None: the place where Ray looks for it.
        environment: Environment variables.

    Returns:
        Path of the file.

    Raises:
        ValueError: The file does not exist, or others can read it.
    """
    place = given or environment.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    path = Path(place).expanduser()
    if not path.is_file():
        raise ValueError(
            f"a Ray cluster of several machines is joined with a token alone, and there is none in {place}. Start all "
            "its nodes with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, a file that is the same everywhere, and give "
            "it as --ray-token-file"
        )
    read_token(path, "the Ray token")
    return str(path)


def check_cluster(address: str, token_file: str, seconds: float = 10.0) -> None:
    """Checks that a cluster is at an address, asks for a token, and takes this one.

    The check calls the cluster's control service itself. Ray's own driver takes 20 s to report a wrong token, and
    reports nothing of a cluster that asks for none.

    Args:
        address: HOST:PORT of the cluster.
        token_file: File with the token.
        seconds: Timeout of a call.

    Raises:
        ValueError: The check failed.
    """
    import grpc

    def call(token: str) -> grpc.StatusCode:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            alive(b"", timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        alive = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive", bytes, bytes)
        without = call("")
        if without is grpc.StatusCode.OK:
            raise ValueError(
                f"the Ray cluster at {address} asks for no token: any client of its ports can run anything on its "
                "nodes. Start all of them with RAY_AUTH_MODE=token"
            )
        if without is not grpc.StatusCode.UNAUTHENTICATED:
            raise ValueError(f"--ray-address {address}: no Ray cluster answers there ({without.name.lower()})")
        if call(Path(token_file).read_text().strip()) is grpc.StatusCode.UNAUTHENTICATED:
            raise ValueError(
                f"the Ray cluster at {address} refuses the token of {token_file}: it was started with another"
            )
