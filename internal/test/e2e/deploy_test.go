package e2e

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/apitest"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/runner/cgroup"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// deployNode is namespaces like a host's: processes, mounts and control groups of its own, and the test's network. All of it ends with its first process.
type deployNode struct {
	t      *testing.T
	dir    string // all that is on the disk
	mount  string // of cgroup v2
	cgroup string // the node's root group, as the test sees it
	first  int    // pid of the first process
	ended  chan struct{}
}

// newDeployNode runs a script of testdata/deploy as the first process of a node; its further arguments come after the directory.
func newDeployNode(t *testing.T, script string, prepare func(n *deployNode) (args []string)) *deployNode {
	t.Helper()
	needVM(t)
	mount, err := cgroup.Find()
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "cgroup2", mount != "", "mount cgroup v2: mount -t cgroup2 none /sys/fs/cgroup/unified")
	dir, err := os.MkdirTemp("", dirPrefix) //nolint:usetesting // the VMs' users must reach it, and t.TempDir is private
	if err != nil {
		t.Fatal(err)
	}
	n := &deployNode{t: t, dir: dir, mount: mount, cgroup: filepath.Join(mount, filepath.Base(dir))}
	t.Cleanup(func() {
		if err := errors.Join(removeGroup(t, n.cgroup), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(os.Chmod(dir, 0o755), os.MkdirAll(filepath.Join(dir, "data"), 0o755), os.Mkdir(n.cgroup, 0o755)); err != nil {
		t.Fatal(err)
	}
	args := prepare(n)
	path, err := filepath.Abs("testdata/deploy/" + script)
	if err != nil {
		t.Fatal(err)
	}
	group, err := os.Open(n.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	log, err := os.Create(n.log("node"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command("unshare", append([]string{
		"--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private", "--cgroup", "--uts", "bash", path, dir,
	}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, UseCgroupFD: true, CgroupFD: int(group.Fd())}
	if err := startBound(cmd); err != nil {
		t.Fatal(err)
	}
	n.ended = make(chan struct{})
	go func() {
		_ = cmd.Wait() // it is killed
		close(n.ended)
	}()
	t.Cleanup(func() {
		if t.Failed() {
			n.dump()
		}
		_ = cmd.Process.Kill() // it may have ended
		<-n.ended
	})
	until(t, "the node has a first process", func() (bool, error) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid))
		if err == nil && len(strings.Fields(string(b))) > 0 {
			n.first, err = strconv.Atoi(strings.Fields(string(b))[0])
		}
		return n.first != 0, err
	})
	return n
}

func (n *deployNode) log(name string) string { return filepath.Join(n.dir, name+".log") }

func (n *deployNode) dump() {
	logs, _ := filepath.Glob(filepath.Join(n.dir, "*.log")) // a fixed pattern
	for _, path := range logs {
		b, err := os.ReadFile(path)
		n.t.Logf("%s, %v:\n%s", filepath.Base(path), err, b[max(0, len(b)-8<<10):])
	}
}

// command is a program on the node.
func (n *deployNode) command(args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"--target", strconv.Itoa(n.first), "--mount", "--pid", "--cgroup", "--root", "--wd"}, args...)...)
}

func (n *deployNode) run(args ...string) string {
	n.t.Helper()
	out, err := n.command(args...).CombinedOutput()
	if err != nil {
		n.t.Fatalf("%v on the node: %v\n%s", args, err, out)
	}
	return string(out)
}

// vmms are the processes of the runner's control groups, as the test sees them.
func (n *deployNode) vmms() (pids []int) {
	n.t.Helper()
	groups, err := filepath.Glob(filepath.Join(n.cgroup, "coppice-*", "*", "cgroup.procs"))
	if err != nil {
		n.t.Fatal(err)
	}
	for _, path := range groups {
		pids = append(pids, n.processes(path)...)
	}
	slices.Sort(pids)
	return pids
}

// sidecars are the processes of the control groups beside those, by their names.
func (n *deployNode) sidecars() map[string][]int {
	n.t.Helper()
	groups, err := filepath.Glob(filepath.Join(n.cgroup, "coppice-*.*"))
	if err != nil {
		n.t.Fatal(err)
	}
	out := map[string][]int{}
	for _, group := range groups {
		out[filepath.Ext(group)] = n.processes(filepath.Join(group, "cgroup.procs"))
	}
	return out
}

// bothSidecars waits until a template is in the store of the node's data directory, and has been rehearsed on a pager before.
func (n *deployNode) bothSidecars() map[string][]int {
	n.t.Helper()
	within(n.t, 3*time.Minute, "the template is stored", func() (bool, error) {
		manifests, err := filepath.Glob(filepath.Join(n.dir, "data", "store", "v1", "*", "*", "*", "manifest"))
		return len(manifests) > 0, err
	})
	all := n.sidecars()
	if len(all) != 2 || len(all[".pager"]) != 1 || len(all[".egress"]) != 1 {
		n.t.Fatalf("beside the VMMs are %v, want a pager and an egress process", all)
	}
	return all
}

func (n *deployNode) sameSidecars(what string, want map[string][]int) {
	n.t.Helper()
	if got := n.sidecars(); !maps.EqualFunc(got, want, slices.Equal) {
		n.t.Errorf("%s: the pager and the egress process are %v, want %v", what, got, want)
	}
}

func (n *deployNode) processes(path string) (pids []int) {
	n.t.Helper()
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENODEV) {
		n.t.Fatal(err)
	}
	for f := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			n.t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// removeGroup kills what is in a control group and removes it with those below.
func removeGroup(t *testing.T, dir string) error {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var err error
	for began := time.Now(); time.Since(began) < time.Minute; {
		var dirs []string
		err = filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		})
		slices.Reverse(dirs)
		for _, d := range dirs {
			err = errors.Join(err, syscall.Rmdir(d))
		}
		if err == nil {
			return nil
		}
		<-time.After(20 * time.Millisecond) // the kernel does not say when a group's last process has been reaped
	}
	return err
}

// connect makes a client of a controller, with the key of a file.
func connect(t *testing.T, server, keyFile string) *coppice.Client {
	t.Helper()
	key, err := os.ReadFile(keyFile)
	if err != nil {
		t.Fatal(err)
	}
	client, err := coppice.New(coppice.Config{Server: server, Token: strings.TrimSpace(string(key)), Transport: apitest.Transport(t, nil)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

// resident is a program in a workspace that must go on whatever becomes of the runner.
type resident struct {
	client  *coppice.Client
	ws      coppice.WorkspaceID
	session coppice.SessionID
}

func settle(t *testing.T, client *coppice.Client) resident {
	t.Helper()
	ws, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Image: images.DefaultName})
	if err != nil {
		t.Fatal(err)
	}
	s, err := client.StartSession(t.Context(), ws.ID, coppice.ExecRequest{Command: []string{"sleep", "infinity"}})
	if err != nil {
		t.Fatal(err)
	}
	return resident{client, ws.ID, s.ID}
}

// goesOn waits until the workspace is reachable, and sees that its machine and the program in it are those of before.
func (r resident) goesOn(t *testing.T, what string) {
	t.Helper()
	until(t, what+": the workspace answers", func() (bool, error) {
		_, err := r.client.Exec(t.Context(), r.ws, coppice.ExecRequest{Command: []string{"true"}})
		return err == nil, nil
	})
	s, err := r.client.Session(t.Context(), r.session)
	if err != nil || s.State != coppice.SessionRunning {
		t.Fatalf("%s: the program is %s, %v", what, s.State, err)
	}
}

// forks grows the workspace once, which takes all that a runner can do to a machine, and ends the fork.
func (r resident) forks(t *testing.T) {
	t.Helper()
	grown, err := r.client.ForkWorkspace(t.Context(), r.ws, coppice.ForkWorkspaceRequest{})
	if err != nil || len(grown.Children) != 1 || grown.Children[0].Workspace == nil {
		t.Fatalf("%+v, %v", grown, err)
	}
	if _, err := r.client.TerminateWorkspace(t.Context(), grown.Children[0].Workspace.ID); err != nil {
		t.Fatal(err)
	}
}

// joined waits until a runner has joined.
func joined(t *testing.T, client *coppice.Client) {
	t.Helper()
	until(t, "a runner has joined", func() (bool, error) {
		_, err := client.Ready(t.Context())
		return err == nil, nil
	})
}

func sameVMMs(t *testing.T, what string, got, want []int) {
	t.Helper()
	if len(want) == 0 || !slices.Equal(got, want) {
		t.Errorf("%s: VMMs %v, want %v", what, got, want)
	}
}

// controller starts one on the test's side, with further arguments.
func (n *deployNode) controller(binary string, args ...string) (*server, *coppice.Client) {
	n.t.Helper()
	c := &server{name: "controller", binary: binary, log: n.log("controller"), args: append([]string{
		"--json", "controller", "--allow-weak-database=fsync,full_page_writes,synchronous_commit", "--database", testpg.New(n.t, migrations.Up), "--key-file", filepath.Join(n.dir, "cluster.key"),
		"--api-key-file", filepath.Join(n.dir, "api.key"), "--listen", freeAddress(n.t), "--runner-listen", freeAddress(n.t),
	}, args...)}
	if err := c.start(""); err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(c.kill)
	return c, connect(n.t, c.ready.Server, filepath.Join(n.dir, "api.key"))
}

// ensureToken makes a join token where the runner of the node's data directory needs one.
func (n *deployNode) ensureToken(binary string, c *server, file string) {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), binary, "runner-token", "ensure", "--data-dir", filepath.Join(n.dir, "data"), "--out", file)
	cmd.Env = append(os.Environ(), "COPPICE_SERVER="+c.ready.Server, "COPPICE_TOKEN_FILE="+filepath.Join(n.dir, "api.key"))
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("%v\n%s", err, out)
	}
}

// TestRunnerInAPod replaces the pod of the Helm chart's DaemonSet, in order and by a kill of all that is in it: VMs go on, and so do the
// processes that they need. Then it is one with runner.stopVMs, and all end.
func TestRunnerInAPod(t *testing.T) {
	binary := program(t, "cmd/coppice")
	n := newDeployNode(t, "node.sh", func(n *deployNode) []string { return []string{n.mount} })
	baseImage(t)
	own := freeAddress(t)
	store := "dir:" + filepath.Join(n.dir, "data", "store") // a runner without one has no pager
	c, client := n.controller(binary, "--store", store)
	until(t, "the node is there", func() (bool, error) {
		b, err := os.ReadFile(n.log("node"))
		return strings.Contains(string(b), "the node is up"), err
	})
	token := filepath.Join(n.dir, "data", "token")
	pod := func(name string, stop bool) string {
		n.ensureToken(binary, c, token)
		script, err := filepath.Abs("testdata/deploy/pod.sh")
		if err != nil {
			t.Fatal(err)
		}
		cmd := n.command("bash", script, n.dir, n.mount, name, imageStore(t).Dir(), binary, "runner",
			"--controller", c.ready.Runners, "--join-token-file", token, "--listen", own, "--data-dir", filepath.Join(n.dir, "data"),
			"--store", store, "--images-dir", imageStore(t).Dir(), "--disk-budget", "2G", "--warm", "0", "--vmm", "qemu", "--accel", "tcg", "--max-sandboxes", "8",
			"--stop-vms="+strconv.FormatBool(stop), "--allow-weak-host", weakHost)
		log, err := os.Create(n.log(name))
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		cmd.Stdout, cmd.Stderr = log, log
		if err := startBound(cmd); err != nil {
			t.Fatal(err)
		}
		go func() { _ = cmd.Wait() }() // it ends with the node at the latest
		return filepath.Join(n.cgroup, name)
	}
	// end stops a pod as a kubelet does: it asks the runner, and kills what is left in the pod's group.
	end := func(group string, ask bool) {
		procs := filepath.Join(group, "cgroup.procs")
		if ask {
			for _, pid := range n.processes(procs) {
				if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
					t.Fatal(err)
				}
			}
			until(t, "the runner has ended", func() (bool, error) { return len(n.processes(procs)) == 0, nil })
		}
		if err := os.WriteFile(filepath.Join(group, "cgroup.kill"), []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
		until(t, "the pod has ended", func() (bool, error) { return len(n.processes(procs)) == 0, nil })
	}

	one := pod("one", false)
	joined(t, client)
	r := settle(t, client)
	sidecars := n.bothSidecars()
	vmms := n.vmms()
	for i, how := range []struct {
		what string
		ask  bool
	}{{"after the pod was replaced", true}, {"after all in the pod was killed", false}} {
		end(one, how.ask)
		sameVMMs(t, how.what, n.vmms(), vmms)
		n.sameSidecars(how.what, sidecars)
		one = pod("next-"+strconv.Itoa(i), false)
		r.goesOn(t, how.what)
		if got := n.vmms(); !slices.Contains(got, vmms[0]) {
			t.Errorf("%s: VMMs %v, want %v among them", how.what, got, vmms)
		}
		r.forks(t)
		n.sameSidecars(how.what+", by the next pod", sidecars)
		vmms = n.vmms()
	}
	end(one, true)
	last := pod("last", true)
	r.goesOn(t, "with --stop-vms")
	end(last, true)
	if got := n.vmms(); len(got) > 0 {
		t.Errorf("--stop-vms has left VMMs: %v", got)
	}
	n.sameSidecars("with --stop-vms", map[string][]int{})
}

// TestRunnerInAContainer runs a runner with no more than docker-compose.yml gives it: its capabilities, its devices, a private cgroup that cannot be
// written, no loop device. Told to stop, it ends its VMs.
func TestRunnerInAContainer(t *testing.T) {
	b, err := os.ReadFile("../../../deploy/docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	lists := regexp.MustCompile(`(?m)^    cap_add: \[(.*)\]$`).FindAllStringSubmatch(string(b), -1)
	if len(lists) == 0 {
		t.Fatal("docker-compose.yml gives no service capabilities, as this test knows it")
	}
	capabilities := "-all"
	for name := range strings.SplitSeq(lists[len(lists)-1][1], ", ") { // the runner is the last
		capabilities += ",+" + strings.ToLower(name)
	}
	binary := program(t, "cmd/coppice")
	baseImage(t)
	var client *coppice.Client
	n := newDeployNode(t, "container.sh", func(n *deployNode) []string {
		var c *server
		c, client = n.controller(binary)
		token := filepath.Join(n.dir, "data", "token")
		n.ensureToken(binary, c, token)
		program := filepath.Join(n.dir, "data", "coppice")
		text, err := os.ReadFile(binary)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(program, text, 0o755); err != nil {
			t.Fatal(err)
		}
		return []string{
			imageStore(t).Dir(), capabilities, program, "runner", "--stop-vms", "--allow-weak-host", weakHost,
			"--controller", c.ready.Runners, "--join-token-file", token, "--listen", freeAddress(t), "--data-dir", filepath.Join(n.dir, "data"),
			"--images-dir", imageStore(t).Dir(), "--warm", "1", "--vmm", "qemu", "--accel", "tcg", "--max-sandboxes", "8",
		}
	})
	joined(t, client)
	r := settle(t, client)
	r.forks(t)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.first))
	bounding := regexp.MustCompile(`CapBnd:\t([0-9a-f]+)`).FindSubmatch(status)
	if err != nil || bounding == nil {
		t.Fatalf("%v\n%s", err, status)
	}
	mask, err := strconv.ParseUint(string(bounding[1]), 16, 64)
	if want := strings.Count(capabilities, "+"); err != nil || bits.OnesCount64(mask) != want {
		t.Errorf("the runner is bounded to capabilities %s, want %d of them: %v", bounding[1], want, err)
	}
	vmms := n.processes(filepath.Join(n.cgroup, "cgroup.procs"))
	if len(vmms) < 2 {
		t.Errorf("in the container are %v, want the runner and VMMs", vmms)
	}
	if err := syscall.Kill(n.first, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-n.ended
	log, err := os.ReadFile(n.log("node"))
	if err != nil || strings.Contains(string(log), `"level":"ERROR"`) || strings.Contains(string(log), "panic") {
		t.Errorf("%v\n%s", err, log)
	}
	if left, err := os.ReadDir(filepath.Join(n.dir, "data", "runner", "shells")); err == nil && len(left) > 0 {
		t.Errorf("the container has left %v", left)
	}
}

// TestSystemdUnits runs the units of deploy/systemd on a real systemd, with all their hardening. A restart of the runner leaves its VMs.
func TestSystemdUnits(t *testing.T) {
	const systemd = "/lib/systemd/systemd"
	_, err := os.Stat(systemd)
	require.That(t, "systemd", err == nil, "make setup")
	binary := program(t, "cmd/coppice")
	baseImage(t)
	api, runners, own := freeAddress(t), freeAddress(t), freeAddress(t)
	socket, dsn := socketOf(t, testpg.New(t, nil), "/run/database")
	n := newDeployNode(t, "systemd.sh", func(n *deployNode) []string {
		layer := func(path, from, text string) {
			t.Helper()
			if from != "" {
				b, err := os.ReadFile(from)
				if err != nil {
					t.Fatal(err)
				}
				text = string(b)
			}
			path = filepath.Join(n.dir, "layer", path)
			mode := os.FileMode(0o644)
			if from == binary {
				mode = 0o755
			}
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)); err != nil {
				t.Fatal(err)
			}
		}
		const deploy = "../../../deploy/systemd/"
		layer("usr/local/bin/coppice", binary, "")
		layer("etc/systemd/system/coppice-controller.service", deploy+"coppice-controller.service", "")
		layer("etc/systemd/system/coppice-runner.service", deploy+"coppice-runner.service", "")
		layer("usr/lib/sysusers.d/coppice.conf", deploy+"coppice.sysusers.conf", "")
		layer("usr/lib/tmpfiles.d/coppice.conf", deploy+"coppice.tmpfiles.conf", "")
		layer("etc/systemd/system/coppice-test.target", "", "[Unit]\nDescription=Nothing\nDefaultDependencies=no\n")
		// There is no journal: the logs go to files. Nothing else differs from what is shipped.
		for _, name := range []string{"controller", "runner"} {
			layer("etc/systemd/system/coppice-"+name+".service.d/log.conf", "", "[Service]\nStandardOutput=append:/srv/logs/"+name+".log\nStandardError=append:/srv/logs/"+name+".log\n")
		}
		layer("srv/logs/README", "", "logs\n")
		layer("etc/coppice/controller.env", "", "COPPICE_DATABASE="+dsn+"\nCOPPICE_ALLOW_WEAK_DATABASE=fsync,full_page_writes,synchronous_commit\nCOPPICE_LISTEN="+api+"\nCOPPICE_RUNNER_LISTEN="+runners+"\n")
		layer("etc/coppice/runner.env", "", "COPPICE_CONTROLLER=https://"+runners+"\nCOPPICE_LISTEN="+own+"\nCOPPICE_IMAGES_DIR=/srv/images\n"+
			"COPPICE_DISK_BUDGET=2G\nCOPPICE_MAX_SANDBOXES=8\nCOPPICE_WARM=0\nCOPPICE_VMM=qemu\nCOPPICE_ACCEL=tcg\nCOPPICE_ALLOW_WEAK_HOST="+weakHost+"\n")
		return []string{imageStore(t).Dir(), socket}
	})
	until(t, "systemd runs", func() (bool, error) {
		out, err := n.command("systemctl", "is-system-running").CombinedOutput()
		return err == nil && strings.TrimSpace(string(out)) == "running", nil
	})
	t.Cleanup(func() {
		if t.Failed() {
			out, err := n.command("sh", "-c", "systemctl --no-pager status coppice-controller coppice-runner; tail -n 50 /srv/logs/*.log").CombinedOutput()
			t.Logf("%s%v", out, err)
		}
	})
	n.run("systemd-sysusers")
	n.run("systemd-tmpfiles", "--create", "coppice.conf")
	n.run("systemctl", "start", "coppice-controller")
	until(t, "the controller has made its key", func() (bool, error) {
		return n.command("test", "-s", "/var/lib/coppice-controller/api.key").Run() == nil, nil
	})
	key := filepath.Join(n.dir, "api.key")
	if err := os.WriteFile(key, []byte(n.run("cat", "/var/lib/coppice-controller/api.key")), 0o600); err != nil {
		t.Fatal(err)
	}
	client := connect(t, "http://"+api, key)
	until(t, "the controller answers", func() (bool, error) {
		_, err := client.Self(t.Context())
		return err == nil, nil
	})
	n.run("env", "COPPICE_SERVER=http://"+api, "COPPICE_TOKEN_FILE=/var/lib/coppice-controller/api.key", "coppice", "runner-token", "ensure", "--out", "/etc/coppice/join-token")
	n.run("systemctl", "start", "coppice-runner")
	joined(t, client)
	r := settle(t, client)
	vmms := n.vmms()
	if len(vmms) == 0 {
		t.Fatal("the VMM has no control group of its own")
	}
	n.run("systemctl", "restart", "coppice-runner")
	r.goesOn(t, "after a restart of the unit")
	r.forks(t)
	n.run("systemctl", "stop", "coppice-runner")
	if got := n.vmms(); !slices.Contains(got, vmms[0]) {
		t.Errorf("a stop of the unit left VMMs %v, want %v among them", got, vmms)
	}
	n.run("systemctl", "start", "coppice-runner")
	r.goesOn(t, "after a stop and a start")
	n.run("systemctl", "restart", "coppice-controller")
	r.goesOn(t, "after a restart of the controller")
	n.run("systemctl", "is-active", "coppice-controller", "coppice-runner")
}

// socketOf returns a database's socket, "" where it is reached over TCP, and its address with the socket in another directory.
func socketOf(t *testing.T, dsn, as string) (socket, moved string) {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(cfg.Host, "/") {
		return "", dsn
	}
	moved = fmt.Sprintf("host=%s port=%d user=%s dbname=%s sslmode=disable", as, cfg.Port, cfg.User, cfg.Database)
	if cfg.Password != "" {
		moved += " password=" + cfg.Password
	}
	return filepath.Join(cfg.Host, fmt.Sprintf(".s.PGSQL.%d", cfg.Port)), moved
}
