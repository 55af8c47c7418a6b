"""Block network connections except local ones. Python imports this file at start-up if its folder is on PYTHONPATH."""

import socket

_connect, _getaddrinfo = socket.socket.connect, socket.getaddrinfo
LOCAL = ("localhost", "127.0.0.1", "::1", socket.gethostname(), None)


def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in LOCAL:
        raise ConnectionRefusedError(f"the tests block network access: {address}")
    return _connect(self, address)


def getaddrinfo(host, *args, **kwargs):
    if host not in LOCAL:
        raise socket.gaierror(f"the tests block network access: {host}")
    return _getaddrinfo(host, *args, **kwargs)


socket.socket.connect, socket.getaddrinfo = connect, getaddrinfo
