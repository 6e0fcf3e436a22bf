"""`quire gateway`: serves OpenAI's HTTP API in front of running servers."""

from typing import Annotated, Any

import typer

from rpc.addresses import check_server
from rpc.cli.options import Config, build, with_settings
from rpc.gateway.settings import GatewaySettings, check_origin
from rpc.observe.logs import set_up_logging
from rpc.observe.settings import ObserveSettings


@with_settings({GatewaySettings: None, ObserveSettings: "Logs and traces"})
def gateway(
    server: Annotated[
        list[str],
        typer.Option(
            help="HOST:PORT of a running `quire serve`; may be given several times: the others are spares, and if one "
            "is lost, the next goes on. To share the load put `quire frontend` between."
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer only reads it
    allow_origin: Annotated[
        list[str],
        typer.Option(
            help="Origin (https://HOST) whose pages may use it from a browser, or *; may be given several times."
        ),
    ] = [],  # noqa: B006 - as above
    config: Config = None,
    **values: Any,
) -> None:
    """Serve OpenAI's HTTP API from running servers, until SIGTERM, which drains."""
    import asyncio

    from rpc.gateway.process import serve

    try:
        observe = build(ObserveSettings, values)
        set_up_logging(observe.log_format, "gateway")
        for address in server:
            check_server(address)
        for origin in allow_origin:
            check_origin("--allow-origin", origin)
        settings = build(GatewaySettings, values)
        asyncio.run(serve(settings, server, lambda line: print(f"quire: {line}", flush=True), allow_origin, observe))
    except (ValueError, OSError) as error:
        typer.echo(f"quire: {error}", err=True)
        raise typer.Exit(1) from None
