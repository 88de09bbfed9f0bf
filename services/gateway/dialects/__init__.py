"""APIs, one folder each, and the OpenAPI document of all."""
