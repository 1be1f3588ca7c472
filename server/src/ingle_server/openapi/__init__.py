"""The OpenAPI document: paths from the routes, bodies from the structs, the rest from one table."""
