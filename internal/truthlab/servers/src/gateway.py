"""A gateway on aiohttp, which asks an upstream server.

/                 answers at once
/pool?ms=MS       asks the upstream for /sleep?MS through a pool of two connections
/kept, /fresh     asks the upstream by TLS, on a kept connection or on a new one
/resolve          asks the upstream by a name that is resolved for this request, on the shared pool of two threads
/resolve?n=N      resolves N slow names at once on those threads, and nothing else

usage: gateway.py ADDRESS PORT UPSTREAM_ADDRESS PLAIN_PORT TLS_PORT
"""

import asyncio
import concurrent.futures
import ssl
import sys

import aiohttp
from aiohttp import web


def main():
    address, port, upstream, plain, tls = sys.argv[1:]
    routes = web.RouteTableDef()
    app = web.Application()
    # the upstream's certificate is made for the occasion
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    async def clients(app):
        asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(2))
        app["pool"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2))
        app["kept"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting))
        app["fresh"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting, force_close=True))
        app["resolving"] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(use_dns_cache=False, force_close=True, limit=0)
        )
        yield
        for name in ("pool", "kept", "fresh", "resolving"):
            await app[name].close()

    app.cleanup_ctx.append(clients)

    async def ask(client, url):
        async with app[client].get(url) as response:
            return web.Response(text=await response.text(), status=response.status)

    @routes.get("/")
    async def root(_):
        return web.Response(text="ok")

    @routes.get("/pool")
    async def pool(request):
        return await ask("pool", f"http://{upstream}:{plain}/sleep?{request.query['ms']}")

    @routes.get("/kept")
    async def kept(_):
        return await ask("kept", f"https://{upstream}:{tls}/")

    @routes.get("/fresh")
    async def fresh(_):
        return await ask("fresh", f"https://{upstream}:{tls}/")

    @routes.get("/resolve")
    async def resolve(request):
        n = int(request.query.get("n", 0))
        if not n:
            return await ask("resolving", f"http://model.example:{plain}/")
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.getaddrinfo(f"slow{i}.example", 80) for i in range(n)))
        return web.Response(text="ok")

    app.add_routes(routes)
    web.run_app(app, host=address, port=int(port), print=None, access_log=None)


main()
