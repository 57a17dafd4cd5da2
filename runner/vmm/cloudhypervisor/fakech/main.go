// Command fakech stands for cloud-hypervisor v53.0 in tests of the driver, on hosts without KVM. It is started like the
// real one, answers the calls that the driver makes, writes the same files, and fails with the same words. It executes
// no instruction. RAM is the mapping that cloud-hypervisor would make, in this process, so the runner's work on it from
// outside is real. The guest is the program of package line, which lives in that RAM and listens on the agent's vsock
// port.
//
// It has only what the driver uses, and refuses everything else: an argument, a call or a field of a configuration that
// the driver begins to use must be added here, after a look at cloud-hypervisor's source. Seccomp and Landlock are
// accepted and do nothing. Faults are in the program's own file; see faults.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const version = "53.0"

// main does not end by os.Exit, which takes a second in a program with the race detector.
func main() { syscall.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	unix.Umask(0o077)
	f, err := readFaults()
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "error: %v\n", err)
		return 2
	}
	switch {
	case len(args) == 1 && args[0] == "--version":
		if f.is("garbage-version") {
			_, _ = stdout.Write([]byte("\x00\xff\x1b[2Jcloud-hyperv"))
		} else {
			_, _ = fmt.Fprintf(stdout, "cloud-hypervisor v%s\nMigration Protocol Versions: 0\n", f.version())
		}
		return 0
	case f.is("hang:start"):
		select {}
	case f.is("die:start"):
		_, _ = fmt.Fprintln(stderr, "Error: Cloud Hypervisor exited with the following error:\n  fakech: it was told to")
		return 1
	}
	api, ev, err := parse(args, stderr)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "error: %v\n", err)
		return 2
	}
	if err := serve(api, ev, f); err != nil {
		_, _ = fmt.Fprintf(stderr, "Error: Cloud Hypervisor exited with the following chain of errors:\n  %v\n", err)
		return 1
	}
	return 0
}

// parse returns the descriptors of the API's socket and of the event monitor.
func parse(args []string, stderr io.Writer) (api, ev int, err error) {
	flags := flag.NewFlagSet("cloud-hypervisor", flag.ContinueOnError)
	flags.SetOutput(stderr)
	descriptor := func(to *int) func(string) error {
		return func(value string) (err error) {
			*to, err = strconv.Atoi(strings.TrimPrefix(value, "fd="))
			return err
		}
	}
	flags.Func("api-socket", "fd=N", descriptor(&api))
	flags.Func("event-monitor", "fd=N", descriptor(&ev))
	seccomp := flags.String("seccomp", "", "true")
	if err := flags.Parse(args); err != nil {
		return 0, 0, err
	}
	if api == 0 || ev == 0 || *seccomp != "true" || flags.NArg() > 0 {
		return 0, 0, fmt.Errorf("fakech: it must be started with an API, an event monitor and seccomp, not with %q", args)
	}
	return api, ev, nil
}

// faultsMark is written before the faults at the end of the program's own file, by testvm.FakeCloudHypervisor.With.
const faultsMark = "\x00fakech faults:\n"

// readFaults reads the faults at the end of the program's own file: a driver starts a VMM with its own arguments, and
// shows it no other file.
func readFaults() (faults, error) {
	const room = 4096 // for all faults
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	end, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-room), room))
	if err != nil {
		return nil, err
	}
	at := bytes.LastIndex(end, []byte(faultsMark))
	if at < 0 {
		return nil, nil
	}
	return strings.Fields(string(end[at+len(faultsMark):])), nil
}

// serve is the VMM's life.
func serve(api, ev int, f faults) error {
	monitor, err := newEvents(ev, f)
	if err != nil {
		return err
	}
	monitor.emit("vmm", "starting")
	socket := os.NewFile(uintptr(api), "api")
	listener, err := net.FileListener(socket)
	if err != nil {
		return wrap("Error creation API server's socket", err)
	}
	v := &vmm{faults: f, events: monitor, calls: map[string]int{}, exit: make(chan error, 1)}
	go v.serve(listener.(*net.UnixListener)) //nolint:forcetypeassert // the driver's socket
	err = <-v.exit
	v.turn.Lock() // let out the answer that is being written
	defer v.turn.Unlock()
	return err
}
