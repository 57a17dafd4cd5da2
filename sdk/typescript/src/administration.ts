import { all, type Context, only } from "./context.js";
import type * as models from "./gen/models.js";
import type { CallOptions } from "./transport.js";

export interface AuditFilter extends CallOptions {
  /** Instead of the key's own; a key with the scope admin may ask for any. */
  project?: models.ProjectID;
  /** Id of a key or runner. */
  actor?: string;
  action?: string;
  object?: string;
  request?: string;
  operation?: models.OperationID;
  outcome?: models.AuditOutcome;
  since?: Date;
  until?: Date;
}

/** Administration has what operators and owners of keys need. Most of it needs a key with the scope admin. */
export class Administration {
  readonly #context: Context;

  constructor(context: Context) {
    this.#context = context;
  }

  createProject(request: models.CreateProjectRequest, options: CallOptions = {}): Promise<models.Project> {
    return this.#context.transport.call("createProject", { body: request, ...only(options) });
  }

  project(id: models.ProjectID, options: CallOptions = {}): Promise<models.Project> {
    return this.#context.transport.call("getProject", { path: { project_id: id }, signal: options.signal });
  }

  projects(options: CallOptions = {}): AsyncGenerator<models.Project, void, void> {
    return all(this.#context, "listProjects", options);
  }

  patchProject(id: models.ProjectID, request: models.PatchProjectRequest, options: CallOptions = {}): Promise<models.Project> {
    return this.#context.transport.call("patchProject", { path: { project_id: id }, body: request, signal: options.signal });
  }

  async deleteProject(id: models.ProjectID, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteProject", { path: { project_id: id }, signal: options.signal });
  }

  /** createKey makes an API key. Only this answer has its secret. */
  createKey(project: models.ProjectID, request: models.CreateKeyRequest, options: CallOptions = {}): Promise<models.CreatedKey> {
    return this.#context.transport.call("createKey", { path: { project_id: project }, body: request, ...only(options) });
  }

  key(id: models.KeyID, options: CallOptions = {}): Promise<models.APIKey> {
    return this.#context.transport.call("getKey", { path: { key_id: id }, signal: options.signal });
  }

  /** keys yields the keys of a project, newest first, with revoked and expired ones. */
  keys(project: models.ProjectID, options: CallOptions = {}): AsyncGenerator<models.APIKey, void, void> {
    return all(this.#context, "listKeys", { path: { project_id: project }, ...options });
  }

  /** revokeKey revokes a key and the keys that were made with it. */
  async revokeKey(id: models.KeyID, options: CallOptions = {}): Promise<void> {
    await this.#context.transport.call("revokeKey", { path: { key_id: id }, signal: options.signal });
  }

  /** audit yields who changed what, newest first. */
  audit(filter: AuditFilter = {}): AsyncGenerator<models.AuditRecord, void, void> {
    const query = {
      project_id: filter.project,
      actor: filter.actor,
      action: filter.action,
      object_id: filter.object,
      request_id: filter.request,
      operation_id: filter.operation,
      outcome: filter.outcome,
      since: filter.since?.toISOString(),
      until: filter.until?.toISOString(),
    };
    return all(this.#context, "listAudit", { query, signal: filter.signal });
  }

  /** checkAudit compares the audit records with their seals. */
  checkAudit(options: { project?: models.ProjectID } & CallOptions = {}): Promise<models.AuditCheck> {
    return this.#context.transport.call("checkAudit", { query: { project_id: options.project }, patient: true, signal: options.signal });
  }

  runners(options: CallOptions = {}): AsyncGenerator<models.Runner, void, void> {
    return all(this.#context, "listRunners", options);
  }

  /** drainRunner keeps new work off a runner, or, with false, allows it again. */
  drainRunner(id: models.RunnerID, draining: boolean, options: CallOptions = {}): Promise<models.Runner> {
    return this.#context.transport.call("patchRunner", { path: { runner_id: id }, body: { draining }, signal: options.signal });
  }

  /** deleteRunner removes a runner for good. With force, its living workspaces are lost. */
  async deleteRunner(id: models.RunnerID, options: { force?: boolean } & CallOptions = {}): Promise<void> {
    await this.#context.transport.call("deleteRunner", { path: { runner_id: id }, query: { force: options.force || undefined }, signal: options.signal });
  }

  createRunnerToken(request: models.CreateRunnerTokenRequest = {}, options: CallOptions = {}): Promise<models.RunnerToken> {
    return this.#context.transport.call("createRunnerToken", { body: request, signal: options.signal });
  }

  /** collectStore deletes objects from the store that nothing needs, or, with dryRun, only says which. */
  collectStore(options: { dryRun?: boolean } & CallOptions = {}): Promise<models.StoreGarbage> {
    return this.#context.transport.call("collectStore", { query: { dry_run: options.dryRun || undefined }, patient: true, signal: options.signal });
  }

  /** checkStore compares the store with the database. */
  checkStore(options: CallOptions = {}): Promise<models.StoreReport> {
    return this.#context.transport.call("checkStore", { patient: true, signal: options.signal });
  }

  /** checkStoreData verifies a part of the stored data for a few seconds; pass `next` of the answer as `after` to go on. */
  checkStoreData(options: { part?: number; of?: number; after?: string } & CallOptions = {}): Promise<models.StoreData> {
    return this.#context.transport.call("checkStoreData", { query: { part: options.part, of: options.of, after: options.after }, signal: options.signal });
  }
}
