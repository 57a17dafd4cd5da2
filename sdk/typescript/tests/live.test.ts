import * as fs from "node:fs";
import { execFile } from "node:child_process";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { promisify } from "node:util";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { connect, type Coppice, isCode, type Workspace, writeTar } from "@coppice/sdk";
import { LiveServer } from "./live.js";

const text = (data: Uint8Array): string => new TextDecoder().decode(data);

async function toArray<T>(items: AsyncIterable<T>): Promise<T[]> {
  const out: T[] = [];
  for await (const item of items) out.push(item);
  return out;
}

describe.skipIf(process.env["SDK_SHORT"] === "1")("against a live controller", () => {
  let server: LiveServer;
  let coppice: Coppice;
  beforeAll(async () => {
    server = await LiveServer.start();
    coppice = connect({ server: server.address.url, token: server.address.token }, {});
  });
  afterAll(async () => {
    coppice?.close();
    await server?.stop();
  });

  const make = (): Promise<Workspace> => coppice.create(server.address.image);

  test("the life of a workspace", async () => {
    const ws = await coppice.create("base", { name: "life", labels: { a: "b" } });
    expect([ws.name, ws.state, ws.data.labels]).toEqual(["life", "ready", { a: "b" }]);
    expect((await coppice.workspace("life")).id).toBe(ws.id);
    expect((await coppice.workspace(ws.id)).name).toBe("life");
    expect((await toArray(coppice.workspaces({ labels: ["a=b"] }))).map((w) => w.id)).toEqual([ws.id]);
    await ws.patch({ labels: { a: null, c: "d" }, ttl_seconds: 3600 });
    expect(ws.data.labels).toEqual({ c: "d" });
    expect((await ws.suspend()).state).toBe("suspended");
    expect((await ws.resume()).state).toBe("ready");
    expect((await ws.usage()).workspaces).toBe(1);
    expect((await ws.processes())[0]?.comm).toBe("init");
    expect(typeof (await ws.console())).toBe("string");
    expect((await toArray(ws.resealReports())).length).toBeGreaterThan(0);
    const port = await ws.ports.open(8080);
    expect((await ws.ports.list()).map((p) => p.id)).toEqual([port.id]);
    await ws.ports.close(port.id);
    expect((await ws.terminate()).state).toBe("terminated");
    await expect(coppice.workspace("life")).rejects.toMatchObject({ code: "WORKSPACE_NOT_FOUND" });
  });

  test("the tree: checkpoints, forks, restores", async () => {
    await using ws = await make();
    await ws.files.write("/f", "before");
    const node = await ws.checkpoint({ name: "before-it", annotations: { score: 1 } });
    await ws.files.write("/f", "after");
    const forks = await node.fork(3);
    expect([forks.length, forks.failures.length, forks.checkpointId]).toEqual([3, 0, node.id]);
    expect(forks.map((child) => child.name)).toHaveLength(3);
    expect(await Promise.all(forks.map((child) => child.files.readText("/f")))).toEqual(["before", "before", "before"]);
    const both = await ws.fork({ count: 1, branch_name: "branch", checkpoint: { name: "between" } });
    expect(both[0]?.name).toBe("branch");
    expect(await both[0]?.files.readText("/f")).toBe("after");
    const restored = await ws.restore(node);
    expect([restored.workspace.id, ws.data.epoch]).toEqual([ws.id, 2]);
    expect(await ws.files.readText("/f")).toBe("before");
    const named = await node.restore("again");
    expect(named.name).toBe("again");
    expect((await coppice.checkpoint("before-it")).id).toBe(node.id);
    expect((await toArray(ws.checkpoints())).map((c) => c.name)).toEqual(["between", "before-it"]);
    await node.annotate((now) => ({ score: Number(now.annotations["score"]) + 1 }));
    expect((await node.refresh()).data.annotations).toEqual({ score: 2 });
    expect((await toArray(node.lineage()))[0]?.id).toBe(node.id);
    expect((await toArray(node.children())).map((c) => c.name)).toEqual(["between"]);
    const tree = await toArray(node.tree());
    expect(tree.map((t) => [t.checkpoint.name, t.depth])).toEqual([["before-it", 0], ["between", 1]]);
    expect((await toArray(node.tree({ depth: 0 }))).length).toBe(1);
    const pages = await toArray(node.diff(both.checkpointId));
    expect(pages[0]?.from_id).toBe(node.id);
    expect(await toArray(node.effects())).toEqual([]);
    expect((await node.usage()).workspaces).toBeGreaterThan(0);
    const plan = await node.prune({ max_age_seconds: 1, dry_run: true });
    expect(plan.dry_run).toBe(true);
    expect((await node.setRetention({ max_bytes: 1 << 30 })).policy).toEqual({ max_bytes: 1 << 30 });
    expect((await node.retention()).checkpoint_id).toBe(node.id);
    await node.deleteRetention();
    for (const child of [...forks, ...both, named]) await child.terminate();
    const between = await coppice.checkpoint("between");
    expect((await between.delete({ dryRun: true }))?.items).toHaveLength(1);
    expect(await between.delete()).toBeUndefined();
  });

  test("programs: results, input, output as it comes, signals", async () => {
    await using ws = await make();
    const echo = await ws.run(["echo", "hé"]);
    expect([echo.stdout, echo.stderr, echo.exitCode, echo.ok, echo.check() === echo]).toEqual(["hé\n", "", 0, true, true]);
    expect((await ws.run("echo of a shell")).stdout).toBe("of a shell\n");
    expect((await ws.run(["err", "x"])).stderr).toBe("x\n");
    const failed = await ws.run(["exit", "7"]);
    expect(failed.exitCode).toBe(7);
    expect(() => failed.check()).toThrow(/COMMAND_FAILED/);
    await expect(ws.run(["nonsense"])).rejects.toMatchObject({ code: "COMMAND_NOT_FOUND" });
    expect((await ws.run(["env"], { env: { A: "b" } })).stdout).toContain("A=b\n");
    expect((await ws.run(["cat"], { stdin: "text" })).stdout).toBe("text");
    expect((await ws.run(["cat"], { stdin: new Uint8Array([0, 255]) })).stdoutBytes).toEqual(new Uint8Array([0, 255]));
    expect(await ws.run(["sleep", "3600"], { timeoutMs: 100 })).toMatchObject({ timedOut: true });
    const session = await ws.exec(["cat"], { stdin: true });
    const reading = toArray(session.stdout());
    await session.write("one ");
    await session.closeStdin("two");
    expect((await reading).map(text).join("")).toBe("one two");
    expect(await session.wait()).toEqual({ exitCode: 0, signal: undefined, timedOut: false });
    const both = await ws.exec(["err", "y"]);
    expect((await toArray(both)).map((o) => [o.stream, text(o.data)])).toEqual([["stderr", "y\n"]]);
    const live = await ws.exec(["cat"], { stdin: true, pty: { cols: 80, rows: 24 } });
    const attachment = await live.attach();
    await attachment.write("typed");
    for await (const event of attachment) {
      if (event.type === "output") await attachment.closeStdin();
      if (event.type === "exit") expect(event.session.exit_code).toBe(0);
    }
    const sleeper = await ws.exec(["sleep", "3600"]);
    await sleeper.resize(100, 30);
    await sleeper.signal("SIGTERM");
    expect((await sleeper.wait()).exitCode).toBe(143);
    expect((await toArray(ws.sessions())).map((s) => s.id)).toContain(sleeper.id);
    await sleeper.kill();
    await expect(ws.session(sleeper.id)).rejects.toMatchObject({ code: "SESSION_NOT_FOUND" });
  });

  test("steps", async () => {
    await using ws = await make();
    const node = await ws.checkpoint();
    const stop = new AbortController();
    const actions = [{ command: ["echo", "1"], files: [{ path: "/f", content: "x" }] }, { command: ["false"], only_if: { exit_code: 0 } }];
    const events = await toArray(node.streamStep({ actions, parallel: 1 }, { idempotencyKey: `step-${node.id}`, signal: stop.signal }));
    expect(events).toHaveLength(3);
    const ended = events.flatMap((event) => (event.action ? [event.action] : [])).sort((a, b) => a.index - b.index);
    expect(ended.map((a) => [a.exit_code, a.stdout, a.kept])).toEqual([[0, "1\n", "checkpoint"], [1, undefined, "nothing"]]);
    const again = await node.step({ actions, parallel: 1 }, { idempotencyKey: `step-${node.id}` });
    expect(again.actions.map((a) => a.checkpoint_id)).toEqual(ended.map((a) => a.checkpoint_id));
    const child = await coppice.checkpoint(ended[0]?.checkpoint_id ?? "");
    expect(text(await child.readFile("/f"))).toBe("x");
    await expect(node.step([{}])).rejects.toMatchObject({ code: "INVALID_FIELD" });

    const within = await ws.step({ command: ["inc"], files: [{ path: "/g", content: "y" }], when: "on_success" });
    expect([within.exit_code, within.kept, within.workspace_id]).toEqual([0, "checkpoint", ws.id]);
    expect(text(await (await coppice.checkpoint(within.checkpoint_id ?? "")).readFile("/g"))).toBe("y");
    expect(await ws.step({ command: ["echo", "same"], when: "on_change" })).toMatchObject({ exit_code: 0, kept: "nothing", unchanged: true });

    let operation = "";
    const canceled = async (): Promise<void> => {
      for await (const event of node.streamStep([{ command: ["sleep", "3600"], timeout_ms: 3_600_000 }])) {
        operation = event.operation_id;
        expect((await coppice.cancelOperation(operation)).state).toBe("failed");
      }
    };
    await expect(canceled()).rejects.toMatchObject({ code: "OPERATION_CANCELED" });
    expect((await toArray(coppice.operations({ checkpoint: node.id, kinds: ["step_checkpoint"] }))).map((o) => o.id)).toContain(operation);
  });

  test("100 MiB of binary output arrive whole", async () => {
    await using ws = await make();
    const session = await ws.exec(["fill", String(100 << 20)]);
    let size = 0;
    let right = true;
    for await (const chunk of session.stdout()) {
      right &&= chunk[0] === size % 256 && chunk[chunk.length - 1] === (size + chunk.length - 1) % 256;
      size += chunk.length;
    }
    expect([size, right]).toEqual([100 << 20, true]);
  });

  test("files and trees", async () => {
    await using ws = await make();
    await ws.files.write("/d/a", new Uint8Array([0, 1, 255]), { mkdirs: true });
    expect(await ws.files.read("/d/a")).toEqual(Buffer.from([0, 1, 255]));
    expect((await ws.files.stat("/d/a")).size).toBe(3);
    expect([await ws.files.exists("/d/a"), await ws.files.exists("/nope")]).toEqual([true, false]);
    await expect(ws.files.read("/nope")).rejects.toMatchObject({ code: "FILE_NOT_FOUND" });
    const open = await ws.files.open("/d/a");
    expect(open.info.size).toBe(3);
    open.cancel();
    await ws.files.write("/big", new Blob([new Uint8Array(5 << 20)]));
    expect(await ws.files.read("/big")).toHaveLength(5 << 20);
    await ws.files.writeTree("/t", [{ name: "sub/one", data: "1" }, { name: "two", data: "22" }]);
    expect(await ws.files.readText("/t/sub/one")).toBe("1");
    const names: string[] = [];
    for await (const entry of ws.files.readTree("/t")) if (entry.type === "file") names.push(entry.name);
    expect(names.sort()).toEqual(["t/sub/one", "t/two"]);
    const dir = fs.mkdtempSync(join(tmpdir(), "coppice-ts-"));
    fs.mkdirSync(join(dir, "in/deep"), { recursive: true });
    fs.writeFileSync(join(dir, "in/deep/file"), "content");
    expect(await ws.files.copyTo(join(dir, "in"), "/copied")).toBe(7);
    expect(await ws.files.readText("/copied/deep/file")).toBe("content");
    expect(await ws.files.copyTo(join(dir, "in/deep/file"), "/one")).toBe(7);
    expect(await ws.files.copyFrom("/copied", join(dir, "out"))).toMatchObject({ bytes: 7 });
    expect(fs.readFileSync(join(dir, "out/deep/file"), "utf8")).toBe("content");
    await ws.files.copyFrom("/one", join(dir, "single"));
    expect(fs.readFileSync(join(dir, "single"), "utf8")).toBe("content");
    fs.rmSync(dir, { recursive: true });
    await ws.files.remove("/one");
    expect(await ws.files.exists("/one")).toBe(false);
  });

  test("network rules and grants", async () => {
    await using ws = await make();
    await ws.allow(["api.example.com", "bundle:python"]);
    expect(ws.data.network.allow).toEqual(["api.example.com", "bundle:python"]);
    const grant = await ws.grants.put("example", { provider: "custom", secret: "a-secret-value", allowed_hosts: ["api.example.com"], header: "Authorization", env: "EXAMPLE_KEY" });
    expect(JSON.stringify(grant)).not.toContain("a-secret-value");
    expect((await ws.grants.list()).map((g) => g.id)).toEqual(["example"]);
    expect((await ws.grants.get("example")).version).toBe(grant.version);
    await ws.grants.revoke("example");
    await expect(ws.grants.get("example")).rejects.toMatchObject({ code: "GRANT_NOT_FOUND" });
    expect(await toArray(ws.egress({ outcome: "denied" }))).toEqual([]);
    expect(await ws.egressOmitted()).toBeUndefined();
  });

  test("events follow what happens", async () => {
    const controller = new AbortController();
    let ready: () => void = () => undefined;
    const begun = new Promise<void>((resolve) => (ready = resolve));
    const types: string[] = [];
    const reading = (async () => {
      for await (const event of coppice.events({ types: ["workspace"], onReady: ready, signal: controller.signal })) {
        types.push(event.type);
        if (event.type === "workspace.terminated") break;
      }
    })();
    await begun;
    await (await make()).terminate();
    await reading;
    expect(types).toContain("workspace.ready");
    expect((await toArray(coppice.events({ after: "0", past: true }))).length).toBeGreaterThan(types.length);
    controller.abort();
    await expect(toArray(coppice.events({ signal: controller.signal }))).rejects.toMatchObject({ name: "AbortError" });
  });

  test("operations, repeats and errors", async () => {
    const key = `test-${Date.now()}`;
    const first = await coppice.create("base", { name: "repeated", idempotencyKey: key });
    const second = await coppice.create("base", { name: "repeated", idempotencyKey: key });
    expect(second.id).toBe(first.id);
    await expect(coppice.create("base", { name: "other", idempotencyKey: key })).rejects.toMatchObject({ code: "IDEMPOTENCY_MISMATCH", status: 422 });
    await expect(coppice.create("base", { name: "repeated" })).rejects.toMatchObject({ code: "NAME_TAKEN", status: 409 });
    const node = await first.checkpoint();
    const operation = await coppice.waitOperation(node.data.operation_id ?? "");
    expect(operation.state).toBe("succeeded");
    expect((await coppice.operation(operation.id)).kind).toBe("create_checkpoint");
    await first.terminate();
    const invalid = await coppice.create("base", { name: "Not A Name" }).catch((e: unknown) => e);
    expect(isCode(invalid, "INVALID_NAME", "INVALID_FIELD")).toBe(true);
    expect((invalid as { hint: string }).hint).not.toBe("");
    await expect(connect({ server: server.address.url, token: "coppice_wrong" }, {}).self()).rejects.toMatchObject({ code: "UNAUTHENTICATED", status: 401 });
    const gone = await first.run(["true"]).catch((e: unknown) => e);
    expect(isCode(gone, "STATE_CONFLICT", "WORKSPACE_NOT_READY"), String(gone)).toBe(true);
  });

  test("a build and its log", async () => {
    const entries = [{ name: "src/one", data: "1 ü" }];
    const sent = await coppice.putUpload("of-typescript", writeTar(entries));
    expect(await coppice.upload("of-typescript")).toEqual(sent);
    const request = { name: "of-typescript", dockerfile: "FROM base\nCOPY src/ /data/\nRUN echo said by the build\n", context: "of-typescript" };
    const begun = await coppice.startBuild(request);
    let log = "";
    for (let offset = 0, ended = false; ; ) {
      const part = await coppice.operationLog(begun.id, { offset });
      offset += part.length;
      log += Buffer.from(part).toString();
      if (part.length === 0 && ended) break;
      ended = ["succeeded", "failed"].includes((await coppice.operation(begun.id)).state);
    }
    await coppice.waitOperation(begun.id);
    expect(log).toContain("said by the build\n");
    const image = await coppice.builtImage("of-typescript");
    expect((await coppice.builtImages()).map((i) => i.name)).toContain("of-typescript");
    await using ws = await coppice.create("of-typescript");
    expect(await ws.files.readText("/data/one")).toBe("1 ü");
    const again = await coppice.buildImage(request);
    expect(again.build.cached_steps).toBeGreaterThan(0);
    expect(again.checkpoint_id).toBe(image.checkpoint_id);
    await expect(coppice.buildImage({ name: "x", dockerfile: "FROM base\nNONSENSE\n" })).rejects.toMatchObject({ code: "DOCKERFILE_INVALID", status: 400 });
    await coppice.deleteImage("of-typescript");
    await expect(coppice.builtImage("of-typescript")).rejects.toMatchObject({ code: "IMAGE_NOT_FOUND" });
    await coppice.deleteUpload("of-typescript");
    await expect(coppice.upload("of-typescript")).rejects.toMatchObject({ code: "UPLOAD_NOT_FOUND" });
  });

  test("what operators need", async () => {
    const admin = coppice.admin;
    expect((await coppice.self()).scopes).toContain("admin");
    expect((await coppice.ready()).status).toBe("ok");
    expect((await coppice.health()).status).toBe("ok");
    expect(await coppice.specification()).toContain("openapi: 3");
    expect((await toArray(coppice.images())).map((i) => i.name)).toContain(server.address.image);
    expect((await coppice.authority()).certificate).toContain("BEGIN CERTIFICATE");
    const project = await admin.createProject({ name: "blue" });
    expect((await admin.project(project.id)).usage?.workspaces).toBe(0);
    expect((await admin.patchProject(project.id, { quotas: { workspaces: 0 } })).quotas.workspaces).toBe(0);
    const key = await admin.createKey(project.id, { name: "agent", ttl_seconds: 3600 });
    const other = connect({ server: server.address.url, token: key.secret }, {});
    await expect(other.create("base")).rejects.toMatchObject({ code: "QUOTA_EXCEEDED", status: 429 });
    expect(await toArray(other.workspaces())).toEqual([]);
    expect((await admin.key(key.key.id)).name).toBe("agent");
    expect((await toArray(admin.keys(project.id))).length).toBe(1);
    await admin.revokeKey(key.key.id);
    await admin.deleteProject(project.id);
    expect((await toArray(admin.projects())).map((p) => p.id)).not.toContain(project.id);
    expect((await toArray(admin.audit({ action: "createWorkspace" }))).length).toBeGreaterThan(0);
    expect((await admin.checkAudit()).intact).toBe(true);
    const [runner] = await toArray(admin.runners());
    expect((await admin.drainRunner(runner?.id ?? "", true)).state).toBe("draining");
    expect((await admin.drainRunner(runner?.id ?? "", false)).state).toBe("ready");
    await expect(admin.checkStore()).rejects.toMatchObject({ code: "UNSUPPORTED" });
    await expect(admin.collectStore({ dryRun: true })).rejects.toMatchObject({ code: "UNSUPPORTED" });
    await expect(admin.checkStoreData()).rejects.toMatchObject({ code: "UNSUPPORTED" });
  });

  test("a restart of the controller breaks neither waits, output nor events", async () => {
    await using ws = await make();
    const session = await ws.exec(["cat"], { stdin: true });
    const controller = new AbortController();
    let begun: () => void = () => undefined;
    const ready = new Promise<void>((resolve) => (begun = resolve));
    const terminated = (async () => {
      for await (const event of coppice.events({ types: ["checkpoint"], onReady: begun, signal: controller.signal })) if (event.type === "checkpoint.captured") return event.workspace_id;
      return undefined;
    })();
    await ready;
    const output = toArray(session.stdout());
    const attached = toArray(session.output());
    const waiting = session.wait();
    await session.write("before ");
    await server.restart();
    const node = await ws.checkpoint();
    await session.closeStdin("after");
    expect((await output).map(text).join("")).toBe("before after");
    expect((await attached).map((o) => text(o.data)).join("")).toBe("before after");
    expect((await waiting).exitCode).toBe(0);
    expect(await terminated).toBe(node.data.workspace_id);
  });

  test.each([
    ["quickstart.mjs", /^ws: common\nleft: left\nright: common\n$/],
    ["best_of_n.mjs", /^round 1: .*\nround 2: .*\nround 3: .*\nbest: \d+, in checkpoint ckpt_/],
  ])("the example %s", async (name, want) => {
    const installed = process.env["SDK_PACKAGE"];
    if (!installed) throw new Error("SDK_PACKAGE is not set: sdk/typescript/test installs the package and sets it");
    const copy = join(dirname(dirname(dirname(installed))), name); // where it finds the package
    fs.copyFileSync(new URL(`../../../examples/typescript/${name}`, import.meta.url), copy);
    const env = { ...process.env, COPPICE_SERVER: server.address.url, COPPICE_TOKEN: server.address.token };
    const { stdout } = await promisify(execFile)(process.execPath, [copy], { env });
    expect(stdout).toMatch(want);
  });

  test("a thousand small programs, 16 at a time", async () => {
    await using ws = await make();
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next < 1000) {
        const n = String(next++);
        expect((await ws.run(["echo", n])).stdout).toBe(`${n}\n`);
      }
    };
    await Promise.all(Array.from({ length: 16 }, worker));
  });
});
