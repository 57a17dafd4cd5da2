import { CoppiceError, failure } from "./errors.js";
import type { AttachEnd, AttachMessage } from "./gen/models.js";
import type { Socket } from "./wire.js";

export type AttachEvent =
  | { type: "output"; stream: "stdout" | "stderr"; offset: number; data: Uint8Array }
  /** Bytes from one offset to another were dropped. */
  | { type: "truncated"; stream: "stdout" | "stderr"; from: number; to: number }
  /** A message of the client that could not be carried out. */
  | { type: "error"; error: CoppiceError }
  /** The last event. */
  | { type: "exit"; session: AttachEnd };

/** The head of a binary message: the stream and the offset. */
const head = 9;

/** Attachment is a live connection to a session. Its end does not affect the session. */
export class Attachment implements AsyncIterable<AttachEvent> {
  readonly #socket: Socket;

  constructor(socket: Socket) {
    this.#socket = socket;
  }

  /** The events, once. Leaving the loop early detaches. */
  async *[Symbol.asyncIterator](): AsyncGenerator<AttachEvent, void, void> {
    for await (const message of this.#socket.messages) {
      const event = typeof message === "string" ? fromText(message) : fromBinary(message);
      if (event) yield event;
      if (event?.type === "exit") return;
    }
  }

  /** write sends bytes to standard input. */
  write(data: string | Uint8Array): Promise<void> {
    return this.#socket.send(typeof data === "string" ? new TextEncoder().encode(data) : data);
  }

  closeStdin(): Promise<void> {
    return this.#message({ type: "close_stdin" });
  }

  /** resize sets the size of the terminal. */
  resize(cols: number, rows: number): Promise<void> {
    return this.#message({ type: "resize", cols, rows });
  }

  /** signal sends a signal, such as SIGINT, to the foreground processes. */
  signal(signal: string): Promise<void> {
    return this.#message({ type: "signal", signal });
  }

  /** close detaches. The session goes on. */
  close(): void {
    this.#socket.close();
  }

  #message(message: AttachMessage): Promise<void> {
    return this.#socket.send(JSON.stringify(message));
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

function fromBinary(message: Uint8Array): AttachEvent {
  const which = message[0];
  if (message.length < head || (which !== 1 && which !== 2)) throw new CoppiceError("INCOMPLETE", "an attached session sent a message that is no output");
  const offset = Number(new DataView(message.buffer, message.byteOffset, message.byteLength).getBigUint64(1));
  return { type: "output", stream: which === 1 ? "stdout" : "stderr", offset, data: message.subarray(head) };
}

function fromText(message: string): AttachEvent | undefined {
  let m: AttachMessage;
  try {
    m = JSON.parse(message) as AttachMessage;
  } catch (cause) {
    throw new CoppiceError("INCOMPLETE", "an attached session sent a message that is not JSON", { cause });
  }
  switch (m?.type) {
    case "exit":
      return { type: "exit", session: m.session ?? { exit_code: -1, timed_out: false } };
    case "truncated":
      return { type: "truncated", stream: m.stream === "stderr" ? "stderr" : "stdout", from: m.from ?? 0, to: m.to ?? 0 };
    case "error":
      return { type: "error", error: m.problem ? failure(m.problem) : new CoppiceError("INTERNAL", "a message to a session could not be carried out") };
    default:
      return undefined; // of a newer server
  }
}
