import { existsSync } from "node:fs";
import * as http from "node:http";
import type { AddressInfo } from "node:net";
import { connect as dial } from "node:net";
import { dirname } from "node:path";
import { build } from "esbuild";
import { type Browser, chromium } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { LiveServer } from "./live.js";

const program = process.env["COPPICE_CHROMIUM"] ?? "/usr/bin/chromium";

/** bundle makes one script of the installed package, as a bundler of pages does. */
async function bundle(): Promise<string> {
  const installed = process.env["SDK_PACKAGE"];
  if (!installed) throw new Error("SDK_PACKAGE is not set: sdk/typescript/test installs the package and sets it");
  const result = await build({
    stdin: { contents: 'export * from "@coppice/sdk";', resolveDir: dirname(dirname(dirname(installed))) },
    bundle: true,
    write: false,
    format: "iife",
    globalName: "sdk",
    platform: "browser",
    logLevel: "silent",
  });
  return result.outputFiles[0]?.text ?? "";
}

/** proxy serves a page, and passes everything else on to the API, as an application's own server would. */
function proxy(script: string, api: URL): http.Server {
  const server = http.createServer((request, response) => {
    if (request.url === "/") {
      response.writeHead(200, { "content-type": "text/html" }).end('<!doctype html><title>x</title><script src="/sdk.js"></script>');
      return;
    }
    if (request.url === "/sdk.js") {
      response.writeHead(200, { "content-type": "text/javascript" }).end(script);
      return;
    }
    const onward = http.request(new URL(request.url ?? "", api), { method: request.method ?? "GET", headers: request.headers }, (answer) => {
      response.writeHead(answer.statusCode ?? 502, answer.headers);
      answer.pipe(response);
    });
    onward.on("error", () => response.destroy());
    response.on("close", () => onward.destroy());
    request.pipe(onward);
  });
  server.on("upgrade", (request, socket) => {
    const onward = dial(Number(api.port), api.hostname, () => {
      const headers = Object.entries(request.headers).map(([name, value]) => `${name}: ${String(value)}\r\n`);
      onward.write(`${request.method} ${request.url} HTTP/1.1\r\n${headers.join("")}\r\n`);
      onward.pipe(socket);
      socket.pipe(onward);
    });
    onward.on("error", () => socket.destroy());
    socket.on("error", () => onward.destroy());
  });
  return server;
}

describe.skipIf(process.env["SDK_SHORT"] === "1")("in a real browser", () => {
  let live: LiveServer;
  let server: http.Server;
  let browser: Browser;
  beforeAll(async () => {
    if (!existsSync(program)) throw new Error(`there is no ${program}: install Debian's package chromium, or set COPPICE_CHROMIUM`);
    live = await LiveServer.start();
    server = proxy(await bundle(), new URL(live.address.url));
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    browser = await chromium.launch({ executablePath: program, args: ["--no-sandbox", "--disable-dev-shm-usage"], timeout: 300_000 });
  });
  afterAll(async () => {
    await browser?.close();
    server?.closeAllConnections();
    server?.close();
    await live?.stop();
  });

  test("the bundle has nothing of Node.js", async () => {
    const script = await bundle();
    expect(script).not.toMatch(/require\(|node:(fs|http|crypto|path)/);
    expect(script.length).toBeLessThan(300_000);
  });

  test("workspaces, programs, WebSockets, files and events work", async () => {
    const page = await browser.newPage();
    page.setDefaultTimeout(280_000);
    await page.goto(`http://127.0.0.1:${(server.address() as AddressInfo).port}/`);
    // The function runs in the page; nothing of this file is there.
    const got = await page.evaluate(async (token) => {
      const sdk = (globalThis as unknown as { sdk: typeof import("../src/browser.js") }).sdk;
      const coppice = sdk.connect({ server: "/", token });
      const ws = await coppice.create("base", { name: "of-a-page" });
      const run = await ws.run(["echo", "hello"]);
      const session = await ws.exec(["cat"], { stdin: true });
      let output = "";
      const reading = (async () => {
        for await (const { data } of session) output += new TextDecoder().decode(data);
      })();
      await session.write("one ");
      await session.closeStdin("two");
      await reading;
      let followed = "";
      for await (const chunk of session.stdout()) followed += new TextDecoder().decode(chunk);
      await ws.files.write("/f", new Blob(["blob"]));
      const file = await ws.files.readText("/f");
      await ws.files.writeTree("/t", [{ name: "a", data: "1" }]);
      const names: string[] = [];
      for await (const entry of ws.files.readTree("/t")) names.push(entry.name);
      const forks = await (await ws.checkpoint("node")).fork(2);
      const types: string[] = [];
      for await (const event of coppice.events({ after: "0", past: true })) types.push(event.type);
      const refused = await coppice.create("base", { name: "of-a-page" }).catch((e: unknown) => (sdk.isCode(e, "NAME_TAKEN") ? e.code : String(e)));
      const disk = await ws.files.copyTo("/x", "/y").catch((e: unknown) => (sdk.isCode(e, "NOT_HERE") ? e.code : String(e)));
      const controller = new AbortController();
      controller.abort(new Error("enough"));
      const aborted = await ws.refresh({ signal: controller.signal }).catch((e: unknown) => (e as Error).message);
      await ws.terminate();
      return { stdout: run.stdout, output, followed, file, names, forks: forks.length, ready: types.includes("workspace.ready"), refused, disk, aborted, state: ws.state };
    }, live.address.token);
    expect(got).toEqual({
      stdout: "hello\n", output: "one two", followed: "one two", file: "blob", names: expect.arrayContaining(["t/a"]) as string[],
      forks: 2, ready: true, refused: "NAME_TAKEN", disk: "NOT_HERE", aborted: "enough", state: "terminated",
    });
  });
});
