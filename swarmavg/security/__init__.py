"""Peer identities, swarm tokens and the TLS contexts made from them."""
