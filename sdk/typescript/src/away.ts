import { isCode } from "./errors.js";
import { connectionFailed, LostError, pause } from "./wire.js";

/** How long a server may be unreachable, and the pause between tries. */
const awayFor = 60_000;
const awayPause = 1_000;

/** Away tolerates a server that restarts: failures count only when nothing else happened for a minute. */
export class Away {
  #since = 0;
  readonly #signal: AbortSignal | undefined;

  constructor(signal: AbortSignal | undefined) {
    this.#signal = signal;
  }

  /** endure returns after a pause if the failed call should be made again; else it throws the error. */
  async endure(error: unknown): Promise<void> {
    const unreachable = error instanceof LostError || isCode(error, "CONNECTION_FAILED", "CONTROLLER_STOPPING", "DATABASE_UNAVAILABLE", "HTTP_502", "HTTP_503", "HTTP_504");
    if (!unreachable) throw error;
    this.#since ||= Date.now();
    if (Date.now() - this.#since > awayFor) throw connectionFailed("the server", error);
    await pause(awayPause, this.#signal);
  }

  back(): void {
    this.#since = 0;
  }
}
