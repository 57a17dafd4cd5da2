/** The entry for browsers, and for every other runtime that has fetch and WebSocket. It imports nothing of Node.js. */
import { type ClientOptions, Coppice, webBase } from "./client.js";
import { CoppiceError } from "./errors.js";
import { FetchWire } from "./fetchwire.js";

export * from "./common.js";
export { version } from "./version.js";

/** connect makes a client. It connects to nothing yet. In a browser the address may be a path of the page's own server. */
export function connect(options: ClientOptions = {}): Coppice {
  const page = (globalThis as { location?: Location }).location?.href;
  if (options.server === undefined) throw new CoppiceError("INVALID_FIELD", "connect needs the server's address");
  return new Coppice(new FetchWire(options.fetch), { base: webBase(options.server, page), token: options.token, waitLimitMs: options.waitLimitMs });
}
