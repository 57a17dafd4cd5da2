import { execFileSync } from "node:child_process";
import { expect, test } from "vitest";
import { type NewEntry, readTar, type TarEntry, type TarLimits, writeTar } from "../src/tar.js";
import { stream, toBytes } from "./support.js";

type Read = Omit<TarEntry, "body"> & { text: string };

async function entries(tar: AsyncIterable<Uint8Array>, limits?: TarLimits): Promise<Read[]> {
  const out: Read[] = [];
  for await (const { body, ...entry } of readTar(tar, limits)) out.push({ ...entry, text: (await toBytes(body)).toString("utf8") });
  return out;
}

const tree: NewEntry[] = [
  { name: "d", type: "dir", mode: 0o700 },
  { name: "d/empty" },
  { name: "d/file", data: "content", mode: 0o755, mtime: 1234567890 },
  { name: `d/${"long".repeat(60)}ü`, data: "x".repeat(1024) },
  { name: "d/link", type: "symlink", target: "../file" },
  { name: "d/far", type: "symlink", target: "t".repeat(300) },
];

test("what is written is read again, in chunks of any size", async () => {
  const whole = await toBytes(writeTar(tree));
  for (const size of [1, 7, 512, 100_000]) {
    const parts: Uint8Array[] = [];
    for (let at = 0; at < whole.length; at += size) parts.push(whole.subarray(at, at + size));
    const got = await entries(stream(...parts));
    expect(got.map((e) => [e.name, e.type, e.text, e.target])).toEqual([
      ["d/", "dir", "", ""],
      ["d/empty", "file", "", ""],
      ["d/file", "file", "content", ""],
      [`d/${"long".repeat(60)}ü`, "file", "x".repeat(1024), ""],
      ["d/link", "symlink", "", "../file"],
      ["d/far", "symlink", "", "t".repeat(300)],
    ]);
    expect(got[2]).toMatchObject({ mode: 0o755, mtime: 1234567890, size: 7 });
  }
});

test("GNU tar reads what is written, and its archives are read", async () => {
  const list = execFileSync("tar", ["tvf", "-"], { input: await toBytes(writeTar(tree)) }).toString("utf8");
  expect(list).toContain("d/far -> ttt");
  expect(list.trim().split("\n")).toHaveLength(6);
  for (const format of ["gnu", "pax", "ustar"]) {
    const tar = execFileSync("tar", ["cf", "-", `--format=${format}`, "-C", new URL("..", import.meta.url).pathname, "package.json", "tests/tar.test.ts"]);
    const got = await entries(stream(tar));
    expect(got.map((e) => e.name)).toEqual(["package.json", "tests/tar.test.ts"]);
    expect(got[0]?.text).toContain("@coppice/sdk");
  }
});

test("a reader that skips a body gets the next entry", async () => {
  const names: string[] = [];
  for await (const entry of readTar(writeTar(tree))) names.push(entry.name);
  expect(names).toHaveLength(6);
});

test("an archive that is cut short is an error, wherever it is cut", async () => {
  const whole = await toBytes(writeTar([{ name: "a", data: "12345" }]));
  for (const end of [0, 1, 511, 512, 514, 1024, whole.length - 512, whole.length - 1]) {
    await expect(entries(stream(whole.subarray(0, end))), `${end}`).rejects.toMatchObject({ code: "INCOMPLETE" });
  }
});

test("the end mark may be followed by padding, but not by anything without end", async () => {
  const whole = await toBytes(writeTar([{ name: "a" }]));
  expect(await entries(stream(whole, new Uint8Array(10240)))).toHaveLength(1);
  let read = 0;
  async function* endless(): AsyncGenerator<Uint8Array, void, void> {
    yield whole;
    for (; ; read++) yield new Uint8Array(64 << 10);
  }
  await expect(entries(endless())).rejects.toMatchObject({ code: "INCOMPLETE" });
  expect(read).toBeLessThan(100);
});

test("content and entries are bounded before they are read", async () => {
  await expect(entries(writeTar(tree), { maxBytes: 1000 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  await expect(entries(writeTar(tree), { maxEntries: 5 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  expect(await entries(writeTar(tree), { maxBytes: 1031 })).toHaveLength(6);
});

/** raw is a header with fields as they are given. */
function raw(name: string, flag: string, size: string | Uint8Array): Uint8Array {
  const out = Buffer.alloc(512);
  out.write(name, 0);
  out.write("0000644", 100);
  if (typeof size === "string") out.write(size, 124);
  else out.set(size, 124);
  out.write(flag, 156);
  out.write("ustar\x0000", 257, "latin1");
  out.fill(0x20, 148, 156);
  const sum = out.reduce((a, b) => a + b, 0);
  out.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
  return out;
}

function padded(text: string): Uint8Array {
  const bytes = Buffer.from(text);
  return Buffer.concat([bytes, Buffer.alloc((512 - (bytes.length % 512)) % 512)]);
}

const end = new Uint8Array(1024);

test.each(["x", "g", "L", "K"])("an extended header %s is bounded", async (flag) => {
  async function* endless(): AsyncGenerator<Uint8Array, void, void> {
    yield raw("pax", flag, "77777777777");
    throw new Error("it was read");
  }
  await expect(entries(endless())).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
});

test("many small extended headers are counted as entries", async () => {
  async function* endless(): AsyncGenerator<Uint8Array, void, void> {
    for (;;) yield raw("pax", "g", "0");
  }
  await expect(entries(endless(), { maxEntries: 1000 })).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
});

test.each(["L", "K", "g"])("the extended headers %s of one entry are bounded together", async (flag) => {
  let headers = 0;
  async function* endless(): AsyncGenerator<Uint8Array, void, void> {
    for (; headers < 1000; headers++) {
      yield raw("pax", flag, "00000177777");
      yield new Uint8Array(64 << 10).fill(0x61);
    }
  }
  await expect(entries(endless())).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
  expect(headers).toBeLessThan(20);
});

test("a second extended header of one entry is an error", async () => {
  const one = [raw("pax", "x", "00000000006"), padded("6 a=b\n")];
  await expect(entries(stream(...one, ...one, raw("a", "0", "0"), end))).rejects.toMatchObject({ code: "INCOMPLETE" });
  expect(await entries(stream(...one, raw("a", "0", "0"), ...one, raw("b", "0", "0"), end))).toHaveLength(2);
});

test("many records of an extended header are read, and a sparse file is no file", async () => {
  const records = `${"6 a=b\n".repeat(10_000)}22 GNU.sparse.major=1\n`;
  const length = records.length.toString(8).padStart(11, "0");
  const got = await entries(stream(raw("pax", "x", length), padded(records), raw("a", "0", "0"), end));
  expect(got.map((e) => [e.name, e.type])).toEqual([["a", "other"]]);
});

test.each(["path", "linkpath"])("a long %s is an error", async (key) => {
  const value = "y".repeat(20_000);
  const record = `${`20000 ${key}=\n`.length + value.length} ${key}=${value}\n`;
  const length = record.length.toString(8).padStart(11, "0");
  await expect(entries(stream(raw("pax", "x", length), padded(record), raw("a", "2", "0"), end))).rejects.toMatchObject({ code: "LIMIT_EXCEEDED" });
});

test.each(["5 a=b\n", "99 a=b\n", "x a=b\n", "-1 a=b\n", "0 a=b\n", "6 =bb\n", "999999999999999999999 a=b\n", "nothing"])("a broken record %j is an error", async (record) => {
  const length = record.length.toString(8).padStart(11, "0");
  await expect(entries(stream(raw("pax", "x", length), padded(record), raw("a", "0", "0"), end))).rejects.toMatchObject({ code: "INCOMPLETE" });
});

test("a name of a record cannot change anything else", async () => {
  const record = "20 __proto__=polluted".padEnd(19, "x") + "\n";
  const fixed = `${record.length} ${record.slice(3)}`;
  const length = fixed.length.toString(8).padStart(11, "0");
  const got = await entries(stream(raw("pax", "x", length), padded(fixed), raw("a", "0", "0"), end));
  expect(got[0]?.name).toBe("a");
  expect(({} as Record<string, unknown>)["polluted"]).toBeUndefined();
});

test("numbers and sums that are wrong are errors", async () => {
  const huge = new Uint8Array(12).fill(0xff);
  for (const header of [raw("a", "0", "zzz"), raw("a", "0", huge), Buffer.from(raw("a", "0", "0")).fill(7, 0, 3)]) {
    await expect(entries(stream(header, end))).rejects.toMatchObject({ code: "INCOMPLETE" });
  }
});

test("leaving the loop ends the source", async () => {
  let ended = false;
  async function* source(): AsyncGenerator<Uint8Array, void, void> {
    try {
      yield* writeTar(tree);
    } finally {
      ended = true;
    }
  }
  for await (const entry of readTar(source())) {
    expect(entry.name).toBe("d/");
    break;
  }
  expect(ended).toBe(true);
});

test("a file that changes its size while it is written is an error", async () => {
  for (const text of ["1234", "123456"]) {
    await expect(toBytes(writeTar([{ name: "a", data: { size: 5, chunks: stream(text) } }]))).rejects.toMatchObject({ code: "INCOMPLETE" });
  }
});
