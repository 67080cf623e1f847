"""What needs a device: `make test-gpu`; on a box without a network the kit that `make gpu-kit` packs (`docs/gpu.md`)."""
