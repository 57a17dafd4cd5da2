/** MessageQueue holds received messages for one reader. */
export class MessageQueue {
  readonly #limit: number;
  readonly #waiting: (string | Uint8Array)[] = [];
  #size = 0;
  #ended = false;
  #error: Error | undefined;
  #wake: (() => void) | undefined;
  /** Called when the reader has taken a message; size is what still waits. */
  onTaken: ((size: number) => void) | undefined;

  constructor(limit: number) {
    this.#limit = limit;
  }

  /** The bytes that wait. */
  get size(): number {
    return this.#size;
  }

  /** push adds a message; false if it does not fit. One message fits always. */
  push(message: string | Uint8Array): boolean {
    if (this.#ended) return true;
    if (this.#waiting.length > 0 && this.#size + message.length > this.#limit) return false;
    this.#waiting.push(message);
    this.#size += message.length;
    this.#wake?.();
    return true;
  }

  /** end ends the reading after what waits. */
  end(): void {
    this.#ended = true;
    this.#wake?.();
  }

  /** fail ends the reading with an error after what waits. The first end counts. */
  fail(error: Error): void {
    if (!this.#ended) this.#error = error;
    this.end();
  }

  /** read yields the messages; done is called when the reader leaves. */
  async *read(done: () => void): AsyncGenerator<string | Uint8Array, void, void> {
    try {
      for (;;) {
        const message = this.#waiting.shift();
        if (message !== undefined) {
          this.#size -= message.length;
          this.onTaken?.(this.#size);
          yield message;
        } else if (this.#ended) {
          if (this.#error) throw this.#error;
          return;
        } else {
          await new Promise<void>((resolve) => (this.#wake = resolve));
          this.#wake = undefined;
        }
      }
    } finally {
      done();
    }
  }
}
