/** The entry for Node.js, Deno and Bun. */
import { readFileSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";
import { type ClientOptions, Coppice, webBase } from "./client.js";
import { disk } from "./disk.js";
import { CoppiceError } from "./errors.js";
import { FetchWire } from "./fetchwire.js";
import { NodeWire } from "./nodewire.js";
import { version } from "./version.js";

export * from "./common.js";
export { version };

type Environment = Record<string, string | undefined>;

/**
 * connect makes a client. It connects to nothing yet. Address and key come from the options, else from COPPICE_SERVER,
 * and COPPICE_TOKEN or COPPICE_TOKEN_FILE, else from the file that `coppice dev` leaves for its user. A key from that
 * file is only sent to the server of the file.
 */
export function connect(options: ClientOptions = {}, env: Environment = process.env): Coppice {
  const { server, token } = connection(options, env);
  const common = { token, userAgent: `coppice-ts/${version}`, waitLimitMs: options.waitLimitMs, disk };
  if (server.startsWith("unix:")) {
    const socket = /^unix:\/\/(\/.+)$/.exec(server)?.[1];
    if (!socket) throw new CoppiceError("INVALID_FIELD", "the server's address is not unix:///path");
    return new Coppice(new NodeWire(socket), { ...common, base: "http://coppice" });
  }
  const wire = options.fetch ? new FetchWire(options.fetch) : new NodeWire();
  return new Coppice(wire, { ...common, base: webBase(server) });
}

/** connection finds the address and the key. */
export function connection(options: ClientOptions, env: Environment): { server: string; token: string | undefined } {
  let server = options.server || env["COPPICE_SERVER"];
  let token = options.token || env["COPPICE_TOKEN"];
  const tokenFile = env["COPPICE_TOKEN_FILE"];
  if (!token && tokenFile) token = readFileSync(tokenFile, "utf8").trim();
  if (server && token) return { server, token };
  const saved = savedConnection(env);
  server ||= saved.server;
  if (!server) {
    throw new CoppiceError("INVALID_FIELD", "no server is configured: start one with `coppice dev`, or set COPPICE_SERVER, and COPPICE_TOKEN or COPPICE_TOKEN_FILE, or pass server and token");
  }
  if (!token && server === saved.server) token = saved.token;
  return { server, token };
}

function savedConnection(env: Environment): { server?: string; token?: string } {
  const path = env["COPPICE_CONNECTION"] || join(env["XDG_CONFIG_HOME"] || join(env["HOME"] || homedir(), ".config"), "coppice", "connection.json");
  let text: string;
  try {
    text = readFileSync(path, "utf8");
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return {};
    throw error;
  }
  try {
    const value = JSON.parse(text) as { server?: unknown; token?: unknown };
    return { ...(typeof value.server === "string" && { server: value.server }), ...(typeof value.token === "string" && { token: value.token }) };
  } catch {
    throw new CoppiceError("INVALID_FIELD", `${path} is not a connection file: remove it, and start \`coppice dev\` again`); // without its text, which has a key
  }
}
