// Drives Coppice through the unmodified e2b package of npm, on machines. As client.py does, it prints one JSON object a line for
// each check: {"method", "verdict", "note"}.

import { Sandbox, TimeoutError, CommandExitError } from 'e2b'

const TIMEOUT = 600_000
const ABSENT = 'absent: the package does not have it'
let failed = false

async function check(method, f) {
  let verdict = 'works'
  let note = ''
  try {
    note = (await f()) ?? ''
    if (note.startsWith('absent')) [verdict, note] = ['absent', note.slice(note.indexOf(': ') + 2)]
  } catch (err) { // the rest is to be seen, too
    verdict = 'fails'
    note = `${err?.constructor?.name}: ${err?.message}`
    console.error(err)
    failed = true
  }
  console.log(JSON.stringify({ method, verdict, note }))
}

function want(what, message) {
  if (!what) throw new Error(`wanted: ${message}`)
}

async function refused(f, kind = Error) {
  try {
    await f()
  } catch (err) {
    want(err instanceof kind, `${kind.name}, not ${err}`)
    return
  }
  throw new Error('it was not refused')
}

async function until(f, ms = 60_000) {
  for (const end = Date.now() + ms; ;) {
    const got = await f()
    if (got) return got
    want(Date.now() < end, 'it did not come')
    await new Promise((r) => setTimeout(r, 100))
  }
}

const sbx = await Sandbox.create('base', { timeoutMs: TIMEOUT, metadata: { 'a b': 'c&d=ü' }, requestTimeoutMs: TIMEOUT })

await check('Sandbox.create', async () => want(/^[a-z0-9]+$/.test(sbx.sandboxId), sbx.sandboxId))

await check('Sandbox.list', async () => {
  const found = await Sandbox.list({ query: { metadata: { 'a b': 'c&d=ü' } } }).nextItems()
  want(found.length === 1 && found[0].sandboxId === sbx.sandboxId, JSON.stringify(found))
})

await check('commands.run', async () => want((await sbx.commands.run('echo hello')).stdout === 'hello\n', 'hello'))

await check('commands.run (exit status)', async () => {
  try {
    await sbx.commands.run('exit 3')
  } catch (err) {
    want(err instanceof CommandExitError && err.exitCode === 3, String(err))
    return
  }
  throw new Error('no CommandExitError')
})

await check('commands.run (timeout)', () => refused(() => sbx.commands.run('sleep 600', { timeoutMs: 3000 }), TimeoutError))

await check('commands.run (background), kill, wait', async () => {
  const handle = await sbx.commands.run('sleep 600', { background: true, timeoutMs: 0 })
  want((await sbx.commands.list()).some((p) => p.pid === handle.pid), 'its pid in the list')
  want(await handle.kill(), 'it was killed')
  await refused(() => handle.wait(), CommandExitError)
})

await check('pty.create, sendInput, resize, kill', async () => {
  let seen = ''
  const text = new TextDecoder()
  const terminal = await sbx.pty.create({ cols: 80, rows: 24, timeoutMs: 0, onData: (b) => { seen += text.decode(b) } })
  await sbx.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await sbx.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
  await terminal.wait()
  want(seen.includes('30 100'), seen)
})

await check('files.write, files.read', async () => {
  await sbx.files.write('/tmp/dir with space/ü.txt', 'content\n')
  want((await sbx.files.read('/tmp/dir with space/ü.txt')) === 'content\n', 'the content')
})

await check('files.list, exists, getInfo', async () => {
  want((await sbx.files.list('/tmp/dir with space'))[0].name === 'ü.txt', 'the name')
  want(!(await sbx.files.exists('/tmp/none')), 'nothing')
})

await check('files.makeDir, rename, remove', async () => {
  want((await sbx.files.makeDir('/tmp/made')) === true && (await sbx.files.makeDir('/tmp/made')) === false, 'made once')
  await sbx.files.write('/tmp/two', '2')
  await sbx.files.rename('/tmp/two', '/tmp/made/three')
  await sbx.files.remove('/tmp/made/three')
  want(!(await sbx.files.exists('/tmp/made/three')), 'removed')
})

await check('files.watchDir, stop', async () => {
  await sbx.files.makeDir('/tmp/seen')
  const seen = []
  const handle = await sbx.files.watchDir('/tmp/seen', (e) => { seen.push(`${e.name} ${e.type}`) }, { recursive: true, timeoutMs: 0 })
  await sbx.files.write('/tmp/seen/new', '1')
  await until(() => seen.includes('new write'))
  want(seen.join() === 'new create,new chmod,new write', seen.join())
  await handle.stop()
})

await check('Sandbox.getMetrics', async () => {
  const found = await sbx.getMetrics()
  want(found.length === 1 && found[0].memUsed > 0, JSON.stringify(found))
})

await check('Sandbox.pause, Sandbox.connect (paused)', async () => {
  want((await (sbx.pause ?? sbx.betaPause).call(sbx)) !== false, 'it was paused')
  want(!(await sbx.isRunning()), 'it does not run')
  await sbx.connect({ timeoutMs: TIMEOUT })
  want((await sbx.files.read('/tmp/dir with space/ü.txt')) === 'content\n', 'the content')
})

await check('Sandbox.createSnapshot, Sandbox.create (from a snapshot), deleteSnapshot', async () => {
  if (!sbx.createSnapshot) return ABSENT
  const snap = await sbx.createSnapshot()
  const child = await Sandbox.create(snap.snapshotId, { timeoutMs: TIMEOUT, requestTimeoutMs: TIMEOUT })
  want((await child.commands.run('echo child')).stdout === 'child\n', 'child')
  await child.kill()
  want(await Sandbox.deleteSnapshot(snap.snapshotId), 'deleted')
})

await check('Sandbox.fork', async () => {
  if (!sbx.fork) return ABSENT
  const children = (await sbx.fork({ count: 2, timeoutMs: TIMEOUT, requestTimeoutMs: TIMEOUT })).map((c) => c.sandbox ?? c)
  const words = new Set()
  for (const c of children) {
    words.add((await c.commands.run('cat /proc/sys/kernel/random/uuid')).stdout)
    await c.kill()
  }
  want(words.size === 2, 'two different words')
})

await check('Sandbox.kill', async () => {
  want((await sbx.kill()) !== false, 'killed') // old packages say nothing
  want((await Sandbox.kill(sbx.sandboxId)) === false, 'killed once')
})

process.exit(failed ? 1 : 0)
