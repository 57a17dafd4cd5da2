// Drives Coppice through the unmodified e2b package of npm, on machines. As client.py does, it prints one JSON object a line for
// each check: {"method", "verdict", "note"}.

import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { Sandbox, Template, NotFoundError, TimeoutError, CommandExitError, waitForFile } from 'e2b'

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

const sbx = await Sandbox.create('base', { timeoutMs: TIMEOUT, metadata: { 'a b': 'c&d=ü' }, envs: { FROM_CREATE: 'yes' }, requestTimeoutMs: TIMEOUT })

await check('Sandbox.create', async () => want(/^[a-z0-9]+$/.test(sbx.sandboxId), sbx.sandboxId))

await check('Sandbox.getInfo', async () => {
  const info = await sbx.getInfo()
  want(info.sandboxId === sbx.sandboxId && info.metadata['a b'] === 'c&d=ü', JSON.stringify(info))
})

await check('Sandbox.isRunning', async () => want(await sbx.isRunning(), 'it runs'))

await check('Sandbox.setTimeout', async () => {
  const before = (await sbx.getInfo()).endAt
  await sbx.setTimeout(TIMEOUT + 600_000)
  want((await sbx.getInfo()).endAt - before > 300_000, 'it ends later')
})

await check('Sandbox.connect (running)', async () => {
  const again = await Sandbox.connect(sbx.sandboxId, { timeoutMs: TIMEOUT })
  want((await again.commands.run('echo connected')).stdout === 'connected\n', 'connected')
})

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

await check('commands.run (stderr callback)', async () => {
  let seen = ''
  await sbx.commands.run('echo oops >&2', { onStderr: (text) => { seen += text } })
  want(seen === 'oops\n', seen)
})

await check('commands.run (envs)', async () => {
  const out = (await sbx.commands.run('env', { envs: { OF_CALL: '1' } })).stdout
  want(out.includes('OF_CALL=1\n') && out.includes('FROM_CREATE=yes\n'), out)
})

await check('commands.run (timeout)', () => refused(() => sbx.commands.run('sleep 600', { timeoutMs: 3000 }), TimeoutError))

await check('commands.run (background), kill, wait', async () => {
  const handle = await sbx.commands.run('sleep 600', { background: true, timeoutMs: 0 })
  want((await sbx.commands.list()).some((p) => p.pid === handle.pid), 'its pid in the list')
  want(await handle.kill(), 'it was killed')
  await refused(() => handle.wait(), CommandExitError)
})

await check('commands.connect', async () => {
  const handle = await sbx.commands.run('cat', { background: true, stdin: true, timeoutMs: 0 })
  let seen = ''
  const again = await sbx.commands.connect(handle.pid, { timeoutMs: TIMEOUT, onStdout: (text) => { seen += text } })
  await sbx.commands.sendStdin(handle.pid, 'typed\n')
  await until(() => seen === 'typed\n')
  want(await again.kill(), 'it was killed')
  await refused(() => again.wait(), CommandExitError)
  await refused(() => handle.wait(), CommandExitError)
})

await check('commands.kill (unknown pid)', async () => want((await sbx.commands.kill(999999)) === false, 'nothing was killed'))

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

await check('files.write (many, empty, relative)', async () => {
  await sbx.files.write([{ path: 'one.txt', data: '1' }, { path: '/tmp/empty.txt', data: '' }])
  want((await sbx.files.read('one.txt')) === '1' && (await sbx.files.read('/tmp/empty.txt')) === '', 'the contents')
  want((await sbx.commands.run('cat one.txt')).stdout === '1', 'the same directory')
})

await check('files.read (absent)', () => refused(() => sbx.files.read('/tmp/none'), NotFoundError))

await check('files.write (metadata)', async () => {
  await sbx.files.write('/root/described', '1', { metadata: { who: 'me' } })
  const found = sbx.files.getInfo && (await sbx.files.getInfo('/root/described')).metadata
  if (found === undefined) return ABSENT // an old package ignores the option
  want(found.who === 'me', JSON.stringify(found))
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

await check('files.watchDir (absent)', () => refused(() => sbx.files.watchDir('/tmp/none', () => {}), NotFoundError))

await check('Sandbox.updateNetwork', async () => {
  if (!sbx.updateNetwork) return ABSENT
  await sbx.updateNetwork({ allowOut: ['example.com'], denyOut: ['0.0.0.0/0'] })
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

await check('Sandbox.create (pause at the end of its time)', async () => {
  const short = Sandbox.betaCreate
    ? await Sandbox.betaCreate('base', { timeoutMs: TIMEOUT, autoPause: true, requestTimeoutMs: TIMEOUT })
    : await Sandbox.create('base', { timeoutMs: TIMEOUT, lifecycle: { onTimeout: 'pause' }, requestTimeoutMs: TIMEOUT })
  await short.files.write('/tmp/kept', 'kept')
  await short.setTimeout(1000)
  await until(async () => (await short.getInfo()).state === 'paused', TIMEOUT)
  await short.connect({ timeoutMs: TIMEOUT })
  want((await short.files.read('/tmp/kept')) === 'kept', 'the content')
  await short.kill()
})

await check('Template.build, Sandbox.create (from a template)', async () => {
  const dir = mkdtempSync(join(tmpdir(), 'template-'))
  try {
    mkdirSync(join(dir, 'src', 'below'), { recursive: true })
    writeFileSync(join(dir, 'src', 'below', 'a.txt'), 'one')
    const lines = []
    const t = Template({ fileContextPath: dir }).fromTemplate('base').copy('src', '/srv/app').setEnvs({ FROM_TEMPLATE: 'yes' }).setWorkdir('/srv/app')
      .runCmd('echo built > /srv/app/built', { user: 'root' }).setStartCmd('echo $$ > /tmp/started; exec sleep 100000', waitForFile('/tmp/started'))
    const options = { cpuCount: 1, memoryMB: 512, onBuildLogs: (entry) => lines.push(entry.message), requestTimeoutMs: TIMEOUT }
    if (Template.exists) await Template.build(t, 'e2b_Built', options)
    else await Template.build(t, { alias: 'e2b_Built', ...options })
    want(lines.some((line) => line.includes('COPY src /srv/app')), lines.join('\n'))
  } finally {
    rmSync(dir, { recursive: true })
  }
  const child = await Sandbox.create('e2b_Built', { timeoutMs: TIMEOUT, requestTimeoutMs: TIMEOUT })
  want((await child.files.read('/srv/app/below/a.txt')) === 'one', 'the copied file')
  const said = await child.commands.run('kill -0 $(cat /tmp/started) && echo $FROM_TEMPLATE; pwd; cat built')
  want(said.stdout === 'yes\n/srv/app\nbuilt\n', said.stdout)
  await child.kill()
})

await check('Sandbox.kill', async () => {
  want((await sbx.kill()) !== false, 'killed') // old packages say nothing
  want((await Sandbox.kill(sbx.sandboxId)) === false, 'killed once')
})

process.exit(failed ? 1 : 0)
