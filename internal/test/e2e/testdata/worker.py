"""A process that lives through a fork and draws from every generator that Python has. It prepares all of them first."""
import json
import os
import random
import secrets
import signal
import socket
import ssl
import sys
import tempfile
import uuid

N = 64


def draw():
    names = tempfile._get_candidate_names()
    return {
        "random": [random.random() for _ in range(N)],
        "ssl.RAND_bytes": ssl.RAND_bytes(8 * N).hex(),
        "tempfile": [next(names) for _ in range(N)],
        "hash of a string": hash("x"),
        "os.urandom": os.urandom(8 * N).hex(),
        "secrets": [secrets.token_hex() for _ in range(N)],
        "uuid.uuid4": [str(uuid.uuid4()) for _ in range(N)],
    }


def reseed(*_):
    """What a reseal hook asks for."""
    random.seed()
    tempfile._name_sequence = None
    ssl.RAND_add(os.urandom(32), 32.0)


signal.signal(signal.SIGUSR1, reseed)
draw()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = server.accept()
    connection.recv(100)
    connection.sendall(json.dumps(draw()).encode() + b"\n")
    connection.close()
