"""The address of a server; it imports no torch, so that a port in use is reported soon."""

import ipaddress
import socket

from bertkit.errors import UsageError


def bind(host: str, port: int, token: str | None) -> socket.socket:
    """Return a socket that listens at this address, so that no other server takes it while the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY for TCP only
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UsageError(f"{host}:{port} cannot be used ({error.strerror}); give another --port or --host") from None
    if not token and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        listener.close()
        raise UsageError(f"--host {host} lets other machines use the model; give a --token that they must send")
    return listener
