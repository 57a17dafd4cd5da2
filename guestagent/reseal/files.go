//go:build linux

package reseal

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/identity"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

const sshDir = "/etc/ssh"

// oldHostKeys lists the host keys of an SSH server.
func oldHostKeys() ([]string, error) {
	list, err := smallfile.List(sshDir)
	return slices.DeleteFunc(list, func(name string) bool {
		return !strings.HasPrefix(name, "ssh_host_") || !strings.HasSuffix(name, "_key") && !strings.HasSuffix(name, "_key.pub")
	}), err
}

func noSSH() string {
	if list, err := oldHostKeys(); err != nil || len(list) > 0 || smallfile.Exists("/usr/sbin/sshd") {
		return ""
	}
	return "no SSH server and no host keys"
}

// stepSSHKeys gives an SSH server new host keys. Only Ed25519 is made: RSA takes seconds without hardware virtualization.
func stepSSHKeys(_ context.Context, r *Run) (Evidence, error) {
	old, err := oldHostKeys()
	if err != nil {
		return nil, err
	}
	for _, name := range old {
		if err := os.Remove(filepath.Join(sshDir, name)); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(sshDir, 0o755); err != nil {
		return nil, err
	}
	fingerprint, err := writeHostKey(sshDir+"/ssh_host_ed25519_key", r.req.Identity.Hostname)
	if err != nil {
		return nil, err
	}
	// A running server reads its keys again on SIGHUP. It is frozen: the signal is delivered at the thaw.
	reloaded := 0
	if b, err := readBack("/run/sshd.pid"); err == nil {
		if outer := r.outerPID(b); outer > 0 && unix.Kill(outer, unix.SIGHUP) == nil {
			reloaded++
		}
	}
	return Evidence{"fingerprint": fingerprint, "removed": strconv.Itoa(len(old)), "reloaded": strconv.Itoa(reloaded)}, nil
}

// outerPID finds a process by its number in the workload.
func (r *Run) outerPID(inner string) int {
	want, err := strconv.Atoi(inner)
	if err != nil || want <= 1 {
		return 0
	}
	pids, err := r.work.PIDs()
	if err != nil {
		return 0
	}
	for _, pid := range pids {
		if r.work.InnerPID(pid) == want {
			return pid
		}
	}
	return 0
}

func writeHostKey(path, comment string) (fingerprint string, err error) {
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", err
	}
	block, err := ssh.MarshalPrivateKey(priv, "root@"+comment)
	if err != nil {
		return "", err
	}
	sshPub, err := ssh.NewPublicKey(pub)
	if err != nil {
		return "", err
	}
	if err := smallfile.Replace(path, pem.EncodeToMemory(block), 0o600); err != nil {
		return "", err
	}
	line := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(sshPub))) + " root@" + comment + "\n"
	if err := smallfile.Replace(path+".pub", []byte(line), 0o644); err != nil {
		return "", err
	}
	return ssh.FingerprintSHA256(sshPub), nil
}

// pattern matches the files in a directory whose names contain all the parts.
type pattern struct {
	dir   string
	parts []string
}

// matches lists the files that the patterns match.
func matches(patterns []pattern) ([]string, error) {
	var out []string
	for _, p := range patterns {
		list, err := smallfile.List(p.dir)
		if err != nil {
			return nil, err
		}
		for _, name := range list {
			if !slices.ContainsFunc(p.parts, func(part string) bool { return !strings.Contains(name, part) }) {
				out = append(out, p.dir+"/"+name)
			}
		}
	}
	return out, nil
}

// nothing returns a function that says why a removal has nothing to do.
func nothing(patterns []pattern, reason string) func() string {
	return func() string {
		if list, err := matches(patterns); err != nil || len(list) > 0 {
			return ""
		}
		return reason
	}
}

// removal returns a step that only removes files.
func removal(patterns []pattern) func(context.Context, *Run) (Evidence, error) {
	return func(context.Context, *Run) (Evidence, error) {
		list, err := matches(patterns)
		if err != nil {
			return nil, err
		}
		for _, path := range list {
			if err := os.RemoveAll(path); err != nil {
				return nil, err
			}
		}
		return Evidence{"removed": strconv.Itoa(len(list))}, nil
	}
}

// The files that a DHCP client leaves behind, and the saved seeds of random generators.
var (
	dhcpFiles = []pattern{
		{"/var/lib/dhcp", []string{".lease"}},
		{"/var/lib/dhcp", []string{"duid"}},
		{"/var/lib/dhcpcd", nil},
		{"/var/lib/dhcpcd5", nil},
		{"/etc", []string{"dhcpcd.duid"}},
		{"/run/systemd/netif/leases", nil},
		{"/var/lib/systemd/network", nil},
		{"/var/lib/NetworkManager", []string{".lease"}},
		{"/var/lib/NetworkManager", []string{"secret_key"}},
	}
	seedFiles = []pattern{
		{"/var/lib/systemd", []string{"random-seed"}},
		{"/var/lib/urandom", []string{"random-seed"}},
		{"/var/lib/misc", []string{"random-seed"}},
		{"/var/lib", []string{"random-seed"}},
		{"/etc", []string{"random-seed"}},
	}
)

// stepTimers reports programs that act by themselves in every clone after the thaw, as found when the workload was
// quiesced.
func stepTimers(_ context.Context, r *Run) (Evidence, error) {
	if len(r.processes.timers) == 0 {
		return nil, skipError("no cron and no clock daemon runs")
	}
	return Evidence{"running": core.Clip(strings.Join(r.processes.timers, ","))}, nil
}

const journalSocket = "/run/systemd/journal/socket"

func noJournal() string {
	if smallfile.Exists(journalSocket) {
		return ""
	}
	return "no journal"
}

// stepJournal writes a line to the journal, if the guest has one. The journal daemon is frozen: it reads the line after
// the thaw.
func stepJournal(ctx context.Context, r *Run) (Evidence, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unixgram", journalSocket)
	if err != nil {
		return nil, skipError("the journal's socket takes no messages")
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetWriteDeadline(r.received.Add(resealWrite)); err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(conn, "MESSAGE=RESEALED generation=%s checkpoint=%s\nPRIORITY=5\nSYSLOG_IDENTIFIER=coppice\n",
		r.req.Identity.Generation, core.Clip(string(r.req.CheckpointID)))
	if err != nil {
		return nil, skipError("the journal's socket is full")
	}
	return Evidence{"line": "RESEALED"}, nil
}

// stepState replaces the parent's token with the sandbox's own.
func stepState(_ context.Context, r *Run) (Evidence, error) {
	const path = identity.RunDir + "/token"
	if r.req.Token == "" {
		if err := unix.Unlink(path); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, smallfile.PathError("remove", path, err)
		}
		return Evidence{guestapi.EvidenceTokenHash: "none"}, nil
	}
	if err := smallfile.Replace(path, []byte(r.req.Token), 0o600); err != nil {
		return nil, err
	}
	got, err := smallfile.Read(path)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(got)
	return Evidence{guestapi.EvidenceTokenHash: short(sum[:])}, nil
}

// stepGeneration tells programs in the guest that they are in another machine now. They can watch the file with
// inotify.
func stepGeneration(_ context.Context, r *Run) (Evidence, error) {
	const path = identity.RunDir + "/generation"
	if err := smallfile.Replace(path, []byte(r.req.Identity.Generation+"\n"), 0o444); err != nil {
		return nil, err
	}
	got, err := readBack(path)
	return Evidence{guestapi.EvidenceValue: got}, err
}
