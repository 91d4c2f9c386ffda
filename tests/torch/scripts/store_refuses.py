"""What no client of PyTorch sends to the store: it closes that connection, and serves the others."""
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
MAGIC = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
ENDLESS = (2**64 - 1).to_bytes(8, "little")
store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=60))
store.set("mine", "kept")
for sent in (b"GET / HTTP/1.1\r\n\r\n", MAGIC + b"\xff", MAGIC + b"\x01" + ENDLESS, MAGIC + b"\x06" + ENDLESS):
    with socket.create_connection(address, timeout=60) as stranger:
        stranger.sendall(sent)
        try:
            answer = stranger.recv(1)
        except ConnectionResetError:
            answer = b""
        if answer:
            raise SystemExit(f"{sent} was answered with {answer}")
idle = [socket.create_connection(address, timeout=60) for _ in range(200)]
for client in idle[:100]:
    client.sendall(MAGIC + b"\x01" + (8192).to_bytes(8, "little") + b"half a key")
if store.get("mine") != b"kept":
    raise SystemExit("the store lost a key")
print("the store serves on", flush=True)
