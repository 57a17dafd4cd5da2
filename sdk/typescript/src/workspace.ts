import { Checkpoint } from "./checkpoint.js";
import { all, type Context, only } from "./context.js";
import { failure } from "./errors.js";
import { type EventFilter, events } from "./events.js";
import { Files } from "./files.js";
import type * as models from "./gen/models.js";
import { RunResult, Session, sessionsOf, toBase64 } from "./session.js";
import { type CallOptions, keyLife } from "./transport.js";
import { Watches } from "./watches.js";
import { collect } from "./wire.js";

/** A program and its arguments; a text is run by `sh -c`. */
export type Command = string | readonly string[];

export interface RunOptions extends CallOptions {
  /** Absolute path. Default: the image's WORKDIR, else /workspace if it exists, else the user's home. */
  cwd?: string;
  env?: models.Env;
  /** Name or uid, optionally with `:group`. Default: the image's USER, else root. */
  user?: string;
  /** The whole standard input. */
  stdin?: string | Uint8Array;
  /** The server kills the program after this time, by the clock of the VM. */
  timeoutMs?: number;
}

export interface ExecOptions extends Omit<RunOptions, "stdin"> {
  /** The input at the start; with true, standard input stays open for write and closeStdin. */
  stdin?: string | Uint8Array | true;
  /** Give the program a terminal; all its output is in stdout. */
  pty?: boolean | { cols: number; rows: number };
}

/** What a program may take beyond its time-out, which counts by the clock of the VM, until a repeated call gives up. */
const runSlack = 10 * 60_000;
const maxConsole = 1 << 20;

/** Workspace is a running machine. */
export class Workspace {
  readonly #context: Context;
  #data: models.Workspace;
  readonly files: Files;
  readonly grants: Grants;
  readonly ports: Ports;
  readonly watches: Watches;

  constructor(context: Context, data: models.Workspace) {
    this.#context = context;
    this.#data = data;
    this.files = new Files(context, data.id);
    this.grants = new Grants(context, data.id);
    this.ports = new Ports(context, data.id);
    this.watches = new Watches(context, data.id);
  }

  get id(): models.WorkspaceID {
    return this.#data.id;
  }

  get name(): string {
    return this.#data.name;
  }

  /** The state that the server said last; refresh asks again. */
  get state(): models.WorkspaceState {
    return this.#data.state;
  }

  /** What the server said last. */
  get data(): models.Workspace {
    return this.#data;
  }

  async refresh(options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.call("getWorkspace", { path: this.#path(), signal: options.signal });
    return this;
  }

  /**
   * run runs a program to its end. It returns the last MiB of each output stream; exec streams all of it. A status other
   * than 0 is no error: `(await ws.run("make")).check()` makes it one.
   */
  async run(command: Command, options: RunOptions = {}): Promise<RunResult> {
    const body = { ...execRequest(command, options), wait: true };
    const waitLimitMs = options.timeoutMs ? Math.min(options.timeoutMs + runSlack, keyLife) : keyLife;
    const result = await this.#context.transport.call("exec", { path: this.#path(), body, waitLimitMs, patient: true, ...only(options) });
    return new RunResult(result as models.ExecResult);
  }

  /** exec starts a program and returns its session at once. */
  async exec(command: Command, options: ExecOptions = {}): Promise<Session> {
    const { stdin, pty, ...rest } = options;
    const body: models.ExecRequest = { ...execRequest(command, { ...rest, ...(stdin === true || stdin === undefined ? {} : { stdin }) }), wait: false };
    if (stdin === true) body.stdin_open = true;
    if (pty) body.pty = true;
    if (typeof pty === "object") Object.assign(body, { cols: pty.cols, rows: pty.rows });
    const session = await this.#context.transport.call("exec", { path: this.#path(), body, ...only(options) });
    return new Session(this.#context, session as models.Session);
  }

  /**
   * step writes files, runs a program, and then makes a checkpoint, as one operation: always, or only if `when` holds. The
   * workspace goes on. If the program has run and the checkpoint failed, the result has a `problem`.
   */
  step(request: Command | models.WorkspaceStepRequest, options: CallOptions = {}): Promise<models.StepActionResult> {
    const body = typeof request === "string" || Array.isArray(request) ? execRequest(request as Command, {}) : (request as models.WorkspaceStepRequest);
    return this.#context.transport.start("stepWorkspace", { path: this.#path(), body, ...only(options) });
  }

  /** session returns a session by its id. */
  async session(id: models.SessionID, options: CallOptions = {}): Promise<Session> {
    return new Session(this.#context, await this.#context.transport.call("getSession", { path: { session_id: id }, signal: options.signal }));
  }

  /** sessions yields the sessions of the present epoch, newest first. */
  sessions(options: CallOptions = {}): AsyncGenerator<Session, void, void> {
    return sessionsOf(this.#context, this.id, options);
  }

  /** checkpoint captures the running machine, which goes on. The checkpoint can be forked at once. */
  async checkpoint(request: string | models.CreateCheckpointRequest = {}, options: CallOptions = {}): Promise<Checkpoint> {
    const body = typeof request === "string" ? { name: request } : request;
    return new Checkpoint(this.#context, await this.#context.transport.start("createCheckpoint", { path: this.#path(), body, ...only(options) }));
  }

  /** checkpoints yields the checkpoints that were taken of this workspace, newest first. */
  async *checkpoints(options: CallOptions = {}): AsyncGenerator<Checkpoint, void, void> {
    for await (const data of all(this.#context, "listWorkspaceCheckpoints", { path: this.#path(), ...options })) yield new Checkpoint(this.#context, data);
  }

  /** fork checkpoints the running machine and starts forks of it, as one operation. */
  async fork(request: number | models.ForkWorkspaceRequest = {}, options: CallOptions = {}): Promise<Forks> {
    const body = typeof request === "number" ? { count: request } : request;
    return forksOf(this.#context, await this.#context.transport.start("forkWorkspace", { path: this.#path(), body, ...only(options) }));
  }

  /** restore rolls the workspace back, in place, to a checkpoint. It is the same workspace in its next epoch. */
  async restore(checkpoint: Checkpoint | models.CheckpointID, options: CallOptions = {}): Promise<models.RestoreResult> {
    const body = { checkpoint_id: typeof checkpoint === "string" ? checkpoint : checkpoint.id };
    const result = await this.#context.transport.start("restoreWorkspace", { path: this.#path(), body, ...only(options) });
    this.#data = result.workspace;
    return result;
  }

  /** suspend checkpoints the machine and stops it. Repeated, it does nothing. */
  async suspend(options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.start("suspendWorkspace", { path: this.#path(), signal: options.signal });
    return this;
  }

  /** resume lets a suspended workspace go on. Repeated, it does nothing. */
  async resume(options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.start("resumeWorkspace", { path: this.#path(), signal: options.signal });
    return this;
  }

  /** terminate takes the machine down for good. Its checkpoints stay. Repeated, it does nothing. */
  async terminate(options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.start("deleteWorkspace", { path: this.#path(), signal: options.signal });
    return this;
  }

  /** At the end of an `await using` block the workspace is terminated. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.terminate();
  }

  /** patch changes labels, time to live, what happens when it is idle, or network rules. */
  async patch(request: models.PatchWorkspaceRequest, options: CallOptions = {}): Promise<this> {
    this.#data = await this.#context.transport.call("patchWorkspace", { path: this.#path(), body: request, signal: options.signal });
    return this;
  }

  /** allow sets what the workspace may reach, such as "api.example.com" or "bundle:python", and its forks at most. */
  allow(rules: string[], options: CallOptions = {}): Promise<this> {
    return this.patch({ network: { allow: rules } }, options);
  }

  /** egress yields what the workspace sent out, or tried to, newest first. */
  egress(filter: { outcome?: models.FlowOutcome; host?: string } & CallOptions = {}): AsyncGenerator<models.Flow, void, void> {
    return all(this.#context, "listEgress", { path: this.#path(), query: { outcome: filter.outcome, host: filter.host }, signal: filter.signal });
  }

  /** egressOmitted says how many flows have no rows of their own, because there are too many. */
  async egressOmitted(options: CallOptions = {}): Promise<models.OmittedFlows | undefined> {
    return (await this.#context.transport.call("listEgress", { path: this.#path(), query: { limit: 1 }, signal: options.signal })).omitted;
  }

  /** events yields the events of this workspace. */
  events(filter: Omit<EventFilter, "workspace"> = {}): AsyncGenerator<models.Event, void, void> {
    return events(this.#context, { ...filter, workspace: this.id });
  }

  usage(options: CallOptions = {}): Promise<models.Usage> {
    return this.#context.transport.call("getWorkspaceUsage", { path: this.#path(), signal: options.signal });
  }

  /** processes lists the processes of the workload. */
  async processes(options: CallOptions = {}): Promise<models.Process[]> {
    return (await this.#context.transport.call("listProcesses", { path: this.#path(), signal: options.signal })).items;
  }

  /** console returns the end of the machine's serial console. The guest wrote it. */
  async console(options: CallOptions = {}): Promise<string> {
    const answer = await this.#context.transport.stream("getConsole", { path: this.#path(), signal: options.signal });
    return new TextDecoder().decode(await collect(answer.body, maxConsole, "the console"));
  }

  /** resealReports yields what the workspace got new at its fork and at each restore, newest first. */
  resealReports(options: CallOptions = {}): AsyncGenerator<models.ResealRecord, void, void> {
    return all(this.#context, "listResealReports", { path: this.#path(), ...options });
  }

  /** attestation returns the signed report of a reseal, as the bytes that `coppice attest verify` accepts. */
  async attestation(options: { epoch?: number } & CallOptions = {}): Promise<Uint8Array> {
    const answer = await this.#context.transport.stream("getAttestation", { path: this.#path(), query: { epoch: options.epoch }, signal: options.signal });
    return collect(answer.body, maxConsole, "the attestation");
  }

  #path(): { workspace_id: string } {
    return { workspace_id: this.id };
  }
}

function execRequest(command: Command, options: RunOptions): models.ExecRequest {
  const body: models.ExecRequest = { command: typeof command === "string" ? ["sh", "-c", command] : [...command] };
  if (options.cwd !== undefined) body.cwd = options.cwd;
  if (options.env !== undefined) body.env = options.env;
  if (options.user !== undefined) body.user = options.user;
  if (options.timeoutMs !== undefined) body.timeout_ms = options.timeoutMs;
  if (typeof options.stdin === "string") body.stdin = options.stdin;
  else if (options.stdin !== undefined) body.stdin_base64 = toBase64(options.stdin);
  return body;
}

/** The forks that are ready, in order; `failures` has those that are not. */
export class Forks extends Array<Workspace> {
  /** The checkpoint that they were forked from. */
  checkpointId = "";
  /** The children that failed, by their number in the request, from 0. */
  failures: { index: number; error: Error }[] = [];
  /** The server's answer. */
  data: models.ForkResult | undefined;

  static override get [Symbol.species](): ArrayConstructor {
    return Array;
  }
}

export function forksOf(context: Context, data: models.ForkResult): Forks {
  const forks = new Forks();
  forks.checkpointId = data.checkpoint_id;
  forks.data = data;
  data.children.forEach((child, index) => {
    if (child.workspace) forks.push(new Workspace(context, child.workspace));
    else forks.failures.push({ index, error: failure(child.problem ?? { code: "INTERNAL", message: "the server did not say why a fork failed" }, data.operation_id) });
  });
  return forks;
}

/** Grants let a workspace use secrets that never enter it. */
export class Grants {
  readonly #context: Context;
  readonly #id: models.WorkspaceID;

  constructor(context: Context, id: models.WorkspaceID) {
    this.#context = context;
    this.#id = id;
  }

  async list(options: CallOptions = {}): Promise<models.Grant[]> {
    return (await this.#context.transport.call("listGrants", { path: { workspace_id: this.#id }, signal: options.signal })).items;
  }

  get(name: models.GrantID, options: CallOptions = {}): Promise<models.Grant> {
    return this.#context.transport.call("getGrant", { path: { workspace_id: this.#id, grant_id: name }, signal: options.signal });
  }

  /** put grants the use of a secret to the workspace and its forks, or changes a grant. */
  put(name: models.GrantID, request: models.PutGrantRequest, options: CallOptions = {}): Promise<models.Grant> {
    return this.#context.transport.call("putGrant", { path: { workspace_id: this.#id, grant_id: name }, body: request, signal: options.signal });
  }

  /** revoke takes a grant from the workspace and its forks. */
  async revoke(name: models.GrantID, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteGrant", { path: { workspace_id: this.#id, grant_id: name }, signal: options.signal });
  }
}

/** Ports forward TCP addresses of the runner's host into the workspace. */
export class Ports {
  readonly #context: Context;
  readonly #id: models.WorkspaceID;

  constructor(context: Context, id: models.WorkspaceID) {
    this.#context = context;
    this.#id = id;
  }

  async list(options: CallOptions = {}): Promise<models.Port[]> {
    return (await this.#context.transport.call("listPorts", { path: { workspace_id: this.#id }, signal: options.signal })).items;
  }

  /** open forwards an address of the runner's host, by default a free one, to a port of the guest. */
  open(guestPort: number, options: { listen?: string } & CallOptions = {}): Promise<models.Port> {
    const body: models.CreatePortRequest = { guest_port: guestPort };
    if (options.listen !== undefined) body.listen = options.listen;
    return this.#context.transport.call("createPort", { path: { workspace_id: this.#id }, body, ...only(options) });
  }

  async close(port: models.PortID, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deletePort", { path: { workspace_id: this.#id, port_id: port }, signal: options.signal });
  }
}
