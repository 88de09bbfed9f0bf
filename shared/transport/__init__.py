"""Links between processes over ZeroMQ: sockets, keys, framing, codec, delivery."""
