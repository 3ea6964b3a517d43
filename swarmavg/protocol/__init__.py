"""Sans-IO state machines and their messages: time and events come in, effects go out."""
