"""Which replica gets a request: one thin Serve router (`request_router`, `ray_internals`) and the plain parts it asks.

Import the modules by name; this file imports none, because they differ a lot in what they load.
"""
