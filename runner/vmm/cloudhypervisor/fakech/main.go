// Command fakech stands for cloud-hypervisor v53.0 in tests of the driver, on hosts without KVM. The driver starts it with the same
// arguments. It answers the calls that the driver makes, writes the same files and fails with the same words. It executes no
// instructions. It maps RAM as cloud-hypervisor does, so that what the runner does to RAM from outside is done for real. The
// guest is the program of package line. It lives in that RAM, and listens on the vsock port of the guest agent.
//
// It knows what the driver uses, and refuses everything else with words that begin with "fakech:". Where a client can see the
// difference, a deviation from v53.0 is a fault. It accepts seccomp and Landlock, which do nothing here. A list of faults at the end
// of the program's own file makes something go wrong; see faults.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
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
	flags := flag.NewFlagSet("cloud-hypervisor", flag.ContinueOnError)
	flags.SetOutput(stderr)
	var api, monitor int
	fd := func(to *int) func(string) error {
		return func(s string) error {
			_, err := fmt.Sscanf(s, "fd=%d", to)
			return err
		}
	}
	flags.Func("api-socket", "listening socket, `fd=N`", fd(&api))
	flags.Func("event-monitor", "where events go, `fd=N`", fd(&monitor))
	seccomp := flags.String("seccomp", "", "does nothing")
	asked := flags.Bool("version", false, "print the version")
	if flags.Parse(args) != nil {
		return 2
	}
	switch {
	case f.is("garbage-version") && *asked:
		_, _ = stdout.Write([]byte("\x00\xff\x1b[2Jcloud-hyperv"))
		return 0
	case *asked:
		_, _ = fmt.Fprintf(stdout, "cloud-hypervisor v%s\nMigration Protocol Versions: 0\n", f.version())
		return 0
	case api == 0 || monitor == 0 || *seccomp != "true" || flags.NArg() > 0:
		_, _ = fmt.Fprintf(stderr, "error: fakech: it wants a socket, an event monitor and seccomp, and was started with %q\n", args)
		return 2
	case f.is("hang:start"):
		select {}
	case f.is("die:start"):
		_, _ = fmt.Fprintln(stderr, "Error: Cloud Hypervisor exited with the following error:\n  fakech: it was told to")
		return 1
	}
	if err := serve(f, api, monitor); err != nil {
		_, _ = fmt.Fprintln(stderr, "Error: Cloud Hypervisor exited with the following chain of errors:")
		for i, s := range asChain(err) {
			_, _ = fmt.Fprintf(stderr, "  %d: %s\n", i, s)
		}
		return 1
	}
	return 0
}
