// Command fakech stands for cloud-hypervisor v53.0 in tests of the driver, on hosts without KVM. It is started like it, speaks
// its API, writes its files, and fails with its words; it executes no instruction. RAM is what cloud-hypervisor would map, in this
// process, so that what the runner does to it from outside is done for real; the guest is the program of package line, which
// lives in that RAM, on the vsock port of the guest agent.
//
// What was read in its source and tried on its binary is kept: who differs from v53.0 in something a client can see is at fault.
// seccomp and Landlock are accepted and do nothing. --fake-fault, or a file beside the program, makes
// something go wrong; see faults.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	version = "53.0"
	usage   = "the following required arguments were not provided:\n  <--firmware <firmware>|--kernel <kernel>>"
)

// options are the arguments.
type options struct {
	apiPath string
	apiFD   int
	events  string
	logFile string
	verbose int
	version bool
	stay    bool
	vm      map[string]string // the VM to boot at once, by the names of flags
	faults  faults
}

// main does not end by os.Exit, which takes a second in a program with the race detector.
func main() { syscall.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	unix.Umask(0o077)
	o, err := parse(args)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "error: %v\n", err)
		return 2
	}
	if err := o.addFaults(); err != nil {
		_, _ = fmt.Fprintf(stderr, "error: %v\n", err)
		return 2
	}
	if o.version {
		switch v := o.faults.version(); {
		case o.faults.is("garbage-version"):
			_, _ = stdout.Write([]byte("\x00\xff\x1b[2Jcloud-hyperv"))
		default:
			_, _ = fmt.Fprintf(stdout, "cloud-hypervisor v%s\nMigration Protocol Versions: 0\n", v)
			if o.verbose > 0 {
				_, _ = fmt.Fprintln(stdout, `Enabled features: ["io_uring", "kvm"]`)
			}
		}
		return 0
	}
	if o.faults.is("hang:start") {
		select {}
	}
	if o.faults.is("die:start") {
		_, _ = fmt.Fprintln(stderr, "Error: Cloud Hypervisor exited with the following error:\n  fakech: it was told to")
		return 1
	}
	if err := serve(o); err != nil {
		printChain(stderr, err)
		return 1
	}
	return 0
}

// printChain writes an error as cloud-hypervisor does when it ends of it.
func printChain(w io.Writer, err error) {
	c := asChain(err)
	if len(c) == 1 {
		_, _ = fmt.Fprintf(w, "Error: Cloud Hypervisor exited with the following error:\n  %s\n", c[0])
		return
	}
	_, _ = fmt.Fprintln(w, "Error: Cloud Hypervisor exited with the following chain of errors:")
	for i, s := range c {
		_, _ = fmt.Fprintf(w, "  %d: %s\n", i, s)
	}
}

// valued are the flags with a value that are understood or mean nothing here; vmFlags those of a VM among them.
var (
	vmFlags = []string{"--kernel", "--initramfs", "--cmdline", "--serial", "--console", "--memory", "--cpus"}
	valued  = append([]string{"--api-socket", "--event-monitor", "--log-file", "--log-format", "--seccomp", "--landlock-rules", "--fake-fault"}, vmFlags...)
)

func parse(args []string) (options, error) {
	o := options{apiFD: -1, vm: map[string]string{}}
	needsVM := false
	if len(args) == 0 {
		return o, errors.New(usage)
	}
	for i := 0; i < len(args); i++ {
		name, value, joined := strings.Cut(args[i], "=")
		if !strings.HasPrefix(name, "--") {
			name, joined = args[i], false
		}
		for _, v := range valued {
			if name == v && !joined {
				if i++; i == len(args) {
					return o, fmt.Errorf("a value is required for '%s <%s>' but none was supplied", v, v[2:])
				}
				value = args[i]
			}
		}
		switch name {
		case "--version", "-V":
			o.version = true
		case "--log-format":
		case "--landlock", "--landlock-rules": // of a VM on the command line; one of the API has it in its configuration
			needsVM = true
		case "--seccomp":
			if !slices.Contains([]string{"true", "false", "log", "errno"}, value) {
				return o, fmt.Errorf("invalid value '%s' for '--seccomp <seccomp>'\n  [possible values: true, false, log, errno]", value)
			}
		case "--no-shutdown":
			o.stay = true
		case "--api-socket":
			if fd, ok := strings.CutPrefix(value, "fd="); ok {
				n, err := strconv.Atoi(fd)
				if err != nil {
					return o, fmt.Errorf("parsing API socket: %w", err)
				}
				o.apiFD = n
			} else {
				o.apiPath = strings.TrimPrefix(value, "path=")
			}
		case "--event-monitor":
			o.events = value
		case "--log-file":
			o.logFile = value
		case "--fake-fault":
			o.faults = append(o.faults, strings.Split(value, ",")...)
		case "-v", "-vv", "-vvv":
			o.verbose += len(name) - 1
		default:
			if !slices.Contains(vmFlags, name) {
				return o, fmt.Errorf("unexpected argument '%s' found", args[i])
			}
			o.vm[name] = value
		}
	}
	if (needsVM || len(o.vm) > 0) && o.vm["--kernel"] == "" {
		return o, errors.New(usage)
	}
	return o, nil
}

// faultsMark stands before the faults at the end of the program's own file. testvm.FakeCloudHypervisor.With writes it.
const faultsMark = "\x00fakech faults:\n"

// addFaults adds those at the end of the program's own file: a driver gives its own arguments to a VMM, and its own name, and shows
// it no other file.
func (o *options) addFaults() error {
	const room = 4096 // for all faults
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	end, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-room), room))
	if err != nil {
		return err
	}
	if at := bytes.LastIndex(end, []byte(faultsMark)); at >= 0 {
		o.faults = append(o.faults, strings.Fields(string(end[at+len(faultsMark):]))...)
	}
	return nil
}

// serve is the VMM's life.
func serve(o options) error {
	log := &logger{w: os.Stderr, level: o.verbose}
	if o.logFile != "" {
		f, err := os.OpenFile(o.logFile, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o666) //nolint:gosec // G302: the umask is 077, as cloud-hypervisor sets it
		if err != nil {
			return wrap("Error creating log file", err)
		}
		defer f.Close()
		log.w = f
	}
	ev, err := openEvents(o)
	if err != nil {
		return err
	}
	ev.emit("vmm", "starting", nil)
	v := &vmm{faults: o.faults, events: ev, log: log, stay: o.stay, exit: make(chan error, 1)}

	listener, lock, err := listen(o)
	if err != nil {
		return err
	}
	defer lock.Close()
	var api *server
	if listener >= 0 {
		api = &server{vmm: v, listener: listener}
		go api.run()
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT)
	go func() {
		<-signals
		v.turn.Lock()
		defer v.turn.Unlock()
		v.end(v.shutdown())
	}()
	if len(o.vm) > 0 {
		if err := v.bootAtOnce(o.vm); err != nil {
			return err
		}
	}
	err = <-v.exit
	if api != nil {
		api.drain()
	}
	if err == nil && o.apiPath != "" {
		_ = os.Remove(o.apiPath) // it may have been removed
	}
	return err
}

// bootAtOnce boots the VM of the arguments.
func (v *vmm) bootAtOnce(flags map[string]string) error {
	config := map[string]any{}
	payload := map[string]any{"kernel": flags["--kernel"]}
	for flag, field := range map[string]string{"--initramfs": "initramfs", "--cmdline": "cmdline"} {
		if s := flags[flag]; s != "" {
			payload[field] = s
		}
	}
	config["payload"] = payload
	for _, flag := range []string{"--serial", "--console"} {
		mode, path, _ := strings.Cut(flags[flag], "=")
		if mode == "" {
			continue
		}
		c := map[string]any{"mode": strings.ToUpper(mode[:1]) + mode[1:]}
		if path != "" {
			c[mode] = path
		}
		config[flag[2:]] = c
	}
	if size, ok := strings.CutPrefix(flags["--memory"], "size="); ok {
		size, _, _ = strings.Cut(size, ",")
		n, err := strconv.ParseUint(strings.TrimRight(size, "MG"), 10, 32)
		if err != nil {
			return wrap("Error parsing --memory", err)
		}
		unit := map[byte]uint64{'M': 1 << 20, 'G': 1 << 30}[size[len(size)-1]]
		config["memory"] = map[string]any{"size": n * max(unit, 1)}
	}
	v.turn.Lock()
	defer v.turn.Unlock()
	if _, err := v.create(request{body: encode(config)}); err != nil {
		return wrap("Failed to create VM", err)
	}
	if _, err := v.boot(request{}); err != nil {
		return wrap("Failed to boot VM", wrap("The VM could not boot", err))
	}
	return nil
}

// listen opens the API's socket, -1 for none. The lock is that of a path, and is nil for a descriptor.
func listen(o options) (int, *os.File, error) {
	if o.apiFD >= 0 || o.apiPath == "" {
		return o.apiFD, nil, nil
	}
	const words = "Error creation API server's socket"
	lock, err := os.OpenFile(o.apiPath+".lock", os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return -1, nil, wrap(words, err)
	}
	if err := lockFile(lock, unix.F_WRLCK, 0); err != nil {
		return -1, nil, chain{fmt.Sprintf("API socket %q is already in use by another running instance", o.apiPath)}
	}
	_ = os.Remove(o.apiPath) // of a VMM that was killed
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: o.apiPath})
	}
	if err == nil {
		err = unix.Listen(fd, 128)
	}
	if err != nil {
		return -1, nil, wrap(words, err)
	}
	return fd, lock, nil
}

// logger writes the log, as much of it as the driver could show.
type logger struct {
	level int
	mu    sync.Mutex // guards w
	w     io.Writer
}

// at writes a line if -v was given so often.
func (l *logger) at(level int, format string, a ...any) {
	if l.level < level {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = fmt.Fprintf(l.w, "cloud-hypervisor: <vmm> "+format+"\n", a...)
}
