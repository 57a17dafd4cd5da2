import * as fs from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { below, disk, leadsOutside, nameable } from "../src/disk.js";
import { type NewEntry, writeTar } from "../src/tar.js";
import { stream, toBytes } from "./support.js";

// With folding, the disk does not tell upper from lower case below the test's directory.
const folding = vi.hoisted(() => ({ below: "" }));
vi.mock("node:fs/promises", async (original) => {
  const real = await original<typeof import("node:fs/promises")>();
  const fold = (path: unknown): unknown =>
    folding.below && typeof path === "string" && path.startsWith(folding.below) ? folding.below + path.slice(folding.below.length).toLowerCase() : path;
  const wrapped: Record<string, unknown> = { ...real };
  for (const name of ["lstat", "stat", "mkdir", "unlink", "open", "chmod", "link", "rename", "readlink", "rm"]) {
    const call = (real as unknown as Record<string, (...args: unknown[]) => unknown>)[name];
    wrapped[name] = (...args: unknown[]) => call?.(...args.map(fold));
  }
  wrapped["symlink"] = (target: string, path: string) => real.symlink(target, fold(path) as string);
  return wrapped;
});

let dir = "";
let out = "";
beforeEach(() => {
  dir = fs.realpathSync(fs.mkdtempSync(join(tmpdir(), "coppice-ts-")));
  out = join(dir, "out");
  fs.mkdirSync(out);
  fs.writeFileSync(join(dir, "outside"), "untouched");
  fs.mkdirSync(join(dir, "elsewhere"));
});
afterEach(() => {
  folding.below = "";
  fs.rmSync(dir, { recursive: true, force: true });
});

type Hostile = Omit<NewEntry, "type"> & { type?: NewEntry["type"] | "link" };

/** tar makes an archive; hard links too, which writeTar does not make. */
async function tar(entries: Hostile[]): Promise<Uint8Array> {
  const parts: Uint8Array[] = [];
  for (const { type, ...entry } of entries) {
    const bytes = await toBytes(writeTar([{ ...entry, type: type === "link" ? "symlink" : (type ?? "file") }]));
    if (type === "link") {
      bytes.write("1", 156); // one less than the flag of a symbolic link
      const sum = parseInt(bytes.toString("latin1", 148, 154), 8) - 1;
      bytes.write(sum.toString(8).padStart(6, "0"), 148);
    }
    parts.push(bytes.subarray(0, bytes.length - 1024));
  }
  return Buffer.concat([...parts, new Uint8Array(1024)]);
}

async function unpack(entries: Hostile[], base = "top"): Promise<{ bytes: number; leftOut: number }> {
  return disk.unpack(stream(await tar(entries)), base, out, {});
}

function untouched(): void {
  expect(fs.readFileSync(join(dir, "outside"), "utf8")).toBe("untouched");
  expect(fs.readdirSync(join(dir, "elsewhere"))).toEqual([]);
  expect(fs.readdirSync(dir).sort()).toEqual(["elsewhere", "out", "outside"]);
}

test("a tree is packed and unpacked with modes, times and links", async () => {
  const from = join(dir, "elsewhere");
  fs.mkdirSync(join(from, "d/closed"), { recursive: true });
  fs.writeFileSync(join(from, "d/closed/file"), "content", { mode: 0o640 });
  fs.writeFileSync(join(from, "empty"), "");
  fs.symlinkSync("d/closed", join(from, "link"));
  fs.utimesSync(join(from, "d/closed/file"), 1000, 1000);
  fs.chmodSync(join(from, "d/closed"), 0o500);
  const packed = disk.pack(from);
  expect(await disk.unpack(packed.body, "", out, {})).toEqual({ bytes: 7, leftOut: 0 });
  expect(packed.sent()).toBe(7);
  expect(fs.readFileSync(join(out, "link/file"), "utf8")).toBe("content");
  expect(fs.statSync(join(out, "d/closed")).mode & 0o777).toBe(0o500);
  expect(fs.statSync(join(out, "d/closed/file")).mtimeMs).toBe(1_000_000);
  expect(fs.statSync(join(out, "empty")).size).toBe(0);
});

describe("nothing is written outside", () => {
  test.each(["../outside", "/../outside", "top/../../outside", "../../../../outside", "top/./../../outside"])("by the name %s", async (name) => {
    await unpack([{ name, data: "bad" }]);
    expect(fs.readFileSync(join(dir, "outside"), "utf8")).toBe("untouched");
  });

  test("through links to directories", async () => {
    fs.symlinkSync(join(dir, "elsewhere"), join(out, "planted"));
    const got = await unpack([
      { name: "top/abs", type: "symlink", target: join(dir, "elsewhere") },
      { name: "top/abs/f", data: "bad" },
      { name: "top/up", type: "symlink", target: "../elsewhere" },
      { name: "top/up/f", data: "bad" },
      { name: "top/planted/f", data: "good" },
    ]);
    expect(got.leftOut).toBe(2);
    expect(fs.readFileSync(join(out, "planted/f"), "utf8")).toBe("good");
    untouched();
  });

  test("through links in a chain", async () => {
    await unpack([
      { name: "top/a", type: "dir" },
      { name: "top/a/b", type: "symlink", target: "." },
      { name: "top/c", type: "symlink", target: "a/b/../.." },
      { name: "top/c/outside", data: "bad" },
    ]);
    untouched();
  });

  test("through a file that is a link, or a second name of a file", async () => {
    fs.symlinkSync(join(dir, "outside"), join(out, "link"));
    fs.linkSync(join(dir, "outside"), join(out, "hard"));
    await unpack([
      { name: "top/link", data: "new" },
      { name: "top/hard", data: "new" },
    ]);
    expect(fs.readFileSync(join(out, "hard"), "utf8")).toBe("new");
    untouched();
  });

  test("by hard links to what is outside, to links, or through links", async () => {
    fs.symlinkSync(join(dir, "outside"), join(out, "planted"));
    fs.symlinkSync(join(dir, "elsewhere"), join(out, "way"));
    fs.writeFileSync(join(dir, "elsewhere/secret"), "secret");
    const got = await unpack([
      { name: "top/a", type: "link", target: "../outside" },
      { name: "top/b", type: "link", target: "top/planted" },
      { name: "top/c", type: "link", target: "top/way/secret" },
      { name: "top/d", type: "link", target: join(dir, "outside") },
      { name: "top/e", data: "own" },
      { name: "top/f", type: "link", target: "top/e" },
      { name: "top/e", type: "link", target: "top/e" },
    ]);
    expect(got.leftOut).toBe(5);
    expect(fs.readdirSync(out).sort()).toEqual(["e", "f", "planted", "way"]);
    expect(fs.readFileSync(join(out, "f"), "utf8")).toBe("own");
  });

  test("by a link that takes the place of a directory on a disk that folds case", async () => {
    folding.below = out;
    fs.writeFileSync(join(out, "x"), "there");
    const got = await unpack([
      { name: "top/Dir", type: "dir" },
      { name: "top/in/deep/LINK", type: "symlink", target: "../../x" },
      { name: "top/IN/Deep/link/f", data: "good" },
      { name: "top/LINK2", type: "symlink", target: "dir" },
      { name: "top/link2/f", data: "good" },
      { name: "top/own", data: "own" },
      { name: "top/OWN", type: "link", target: "top/own" },
    ]);
    expect(got.leftOut).toBe(1);
    expect(fs.readFileSync(join(out, "in/deep/link/f"), "utf8")).toBe("good");
    expect(fs.readdirSync(join(out, "dir"))).toEqual([]); // link2 was replaced, not followed
    expect(fs.readFileSync(join(out, "own"), "utf8")).toBe("own");
    untouched();
  });

  test("modes of a directory do not go through a link that took its place", async () => {
    fs.chmodSync(join(dir, "elsewhere"), 0o755);
    await unpack([
      { name: "top/d", type: "dir", mode: 0o777 },
      { name: "top/e", type: "dir", mode: 0o700 },
    ]);
    expect(fs.statSync(join(out, "d")).mode & 0o7777).toBe(0o777);
    expect(fs.statSync(join(dir, "elsewhere")).mode & 0o777).toBe(0o755);
  });
});

test("set-user-id bits do not come along", async () => {
  await unpack([{ name: "top/f", data: "x", mode: 0o6755 }]);
  expect(fs.statSync(join(out, "f")).mode & 0o7000).toBe(0);
});

test("bytes and entries are bounded", async () => {
  const archive = await tar([{ name: "top/a", data: "12345" }, { name: "top/b", data: "12345" }]);
  await expect(disk.unpack(stream(archive), "top", out, { maxBytes: 9 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  await expect(disk.unpack(stream(archive), "top", out, { maxEntries: 1 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  await expect(disk.save(stream("12345"), join(out, "s"), 0o644, { maxBytes: 4 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  expect(fs.readdirSync(out)).toEqual(["a"]);
});

test("a file replaces a link of its name", async () => {
  fs.symlinkSync(join(dir, "outside"), join(out, "f"));
  await disk.save(stream("new"), join(out, "f"), 0o600, {});
  expect(fs.readFileSync(join(out, "f"), "utf8")).toBe("new");
  untouched();
});

test.each([
  ["a/b", "../c", false],
  ["a", "../c", true],
  ["a/b", "../../c", true],
  ["a", "x/../y", true],
  ["a", "./b/c", false],
  ["a", "/etc", true],
  ["a", "C:\\x", true],
  ["a", "..\\x", true],
  ["a", "", true],
])("a link %s to %s", (name, target, want) => expect(leadsOutside(name, target)).toBe(want));

test("names are relative to the base", () => {
  expect(below("top", "top")).toBe("");
  expect(below("top", "top/a/../b/")).toBe("b");
  expect(below("top", "topper")).toBe("topper");
  expect(below("", "./a")).toBe("a");
  expect(below("top", "../../x")).toBe("x");
});

test("names that mean something else on Windows are left out there", () => {
  for (const name of ["a\\b", "C:x", "..\\x", "a/.. ", "a./b", "nul?"]) {
    expect(nameable(name, "win32"), name).toBe(false);
    expect(nameable(name, "linux")).toBe(true);
  }
  expect(nameable("a\0b", "linux")).toBe(false);
});
