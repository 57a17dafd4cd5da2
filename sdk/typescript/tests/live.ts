import { type ChildProcess, spawn } from "node:child_process";
import { createInterface } from "node:readline";

/** What the server prints about itself. */
export interface Address {
  url: string;
  token: string;
  image: string;
}

/** A live controller on a database of its own: the program internal/test/sdkserver, whose path is in SDK_SERVER. */
export class LiveServer {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;
  address: Address = { url: "", token: "", image: "" };

  private constructor(program: string) {
    this.#child = spawn(program, { stdio: ["pipe", "pipe", "inherit"] });
    if (!this.#child.stdout) throw new Error("no output");
    this.#lines = createInterface({ input: this.#child.stdout })[Symbol.asyncIterator]();
  }

  static async start(): Promise<LiveServer> {
    const program = process.env["SDK_SERVER"];
    if (!program) throw new Error("SDK_SERVER is not set: sdk/typescript/test builds the server and sets it");
    const server = new LiveServer(program);
    await server.#read();
    return server;
  }

  /** restart ends the controller and starts another at the same address. */
  async restart(): Promise<void> {
    this.#child.stdin?.write("restart\n");
    await this.#read();
  }

  async #read(): Promise<void> {
    const line = await this.#lines.next();
    if (line.done) throw new Error("the server ended");
    this.address = JSON.parse(line.value) as Address;
  }

  async stop(): Promise<void> {
    const ended = new Promise((resolve) => this.#child.once("exit", resolve));
    this.#child.stdin?.end();
    await ended;
  }
}
