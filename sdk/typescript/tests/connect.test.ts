import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { expect, test } from "vitest";
import { connect as browserConnect } from "../src/browser.js";
import { connect, connection, version } from "../src/node.js";

function saved(text: string): Record<string, string> {
  const path = join(mkdtempSync(join(tmpdir(), "coppice-ts-")), "connection.json");
  writeFileSync(path, text);
  return { COPPICE_CONNECTION: path };
}

test("arguments come before the environment, and that before the file", () => {
  const file = saved('{"server": "http://file:1", "token": "of-file"}');
  expect(connection({}, file)).toEqual({ server: "http://file:1", token: "of-file" });
  const env = { ...file, COPPICE_SERVER: "http://env:1", COPPICE_TOKEN: "of-env" };
  expect(connection({}, env)).toEqual({ server: "http://env:1", token: "of-env" });
  expect(connection({ server: "http://arg:1", token: "of-arg" }, env)).toEqual({ server: "http://arg:1", token: "of-arg" });
});

test("a key of the file goes to the server of the file only", () => {
  const file = saved('{"server": "http://file:1", "token": "of-file"}');
  expect(connection({ server: "http://other:1" }, file).token).toBeUndefined();
  expect(connection({}, { ...file, COPPICE_SERVER: "http://other:1" }).token).toBeUndefined();
  expect(connection({ server: "http://file:1" }, file).token).toBe("of-file");
});

test("a key may be in a file of its own", () => {
  const path = join(mkdtempSync(join(tmpdir(), "coppice-ts-")), "token");
  writeFileSync(path, "of-token-file\n");
  expect(connection({}, { COPPICE_SERVER: "http://env:1", COPPICE_TOKEN_FILE: path }).token).toBe("of-token-file");
});

test("what is missing or wrong is said, without the key", () => {
  expect(() => connection({}, { COPPICE_CONNECTION: "/nonexistent/connection.json" })).toThrow(/coppice dev/);
  expect(() => connection({}, saved('{"token": "hidden'))).toThrow(/not a connection file/);
  expect(() => connection({}, saved('{"token": "hidden'))).not.toThrow(/hidden/);
  for (const server of ["ftp://x", "nonsense", "http://user:hidden@x", "unix://relative"]) {
    expect(() => connect({ server, token: "t" }, {})).toThrow();
    expect(() => connect({ server, token: "t" }, {})).not.toThrow(/hidden/);
  }
  expect(() => browserConnect({})).toThrow(/address/);
});

test("a unix socket is a server", async () => {
  const path = join(mkdtempSync(join(tmpdir(), "coppice-ts-")), "api.sock");
  const server = createServer((request, response) => response.end(JSON.stringify({ status: "ok", version: request.url }))).listen(path);
  await new Promise((resolve) => server.once("listening", resolve));
  const coppice = connect({ server: `unix://${path}`, token: "t" }, {});
  expect(await coppice.health()).toEqual({ status: "ok", version: "/healthz" });
  coppice.close();
  await new Promise((resolve) => server.close(resolve));
});

test("the version is that of the package, and its first number that of the API", () => {
  const at = (path: string): string => readFileSync(new URL(path, import.meta.url), "utf8");
  expect((JSON.parse(at("../package.json")) as { version: string }).version).toBe(version);
  const api = /^ {2}version: "(\d+)"$/m.exec(at("../../../api/openapi.yaml"))?.[1];
  expect(version.split(".")[0]).toBe(api);
});
