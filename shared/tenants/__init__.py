"""What tenants share fairly: bounded resources, turns and threads."""
