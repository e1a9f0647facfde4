"""The program of an engine that seals a workspace, begins another layer, says the first one's ident, and stays."""

ENGINE = """
import sys, anyio
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import SandboxSpec
async def main():
    async with SandboxHost.start(SandboxConfig(state_dir=sys.argv[1])) as host:
        async with host.acquire(SandboxSpec()) as box:
            await box.write_file("f", b"1")
            layer = await box.seal()
            host.layers.store.create()
            print(layer.ident, flush=True)
            await anyio.sleep(60)
anyio.run(main)
"""
