"""Channels of messages between peers: interface, framing, registry and the in-process backend."""
