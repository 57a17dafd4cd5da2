//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// identity prints the names of the machine, as its own processes see them.
func identity(_ []string, out io.Writer) error {
	id := map[string]string{}
	for key, path := range map[string]string{
		"machine_id": "/etc/machine-id", "boot_id": "/proc/sys/kernel/random/boot_id", "uuid": "/proc/sys/kernel/random/uuid",
		"generation": filepath.Join(runDir, generation), "token": filepath.Join(runDir, "token"), "hostname_file": "/etc/hostname",
		"ssh_host_key": "/etc/ssh/ssh_host_ed25519_key.pub", "tfo_key": "/proc/sys/net/ipv4/tcp_fastopen_key",
	} {
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		id[key] = strings.TrimSpace(string(b))
	}
	var err error
	if id["hostname"], err = os.Hostname(); err != nil {
		return err
	}
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			return err
		}
		id["mac"] += l.HardwareAddr.String()
		for _, a := range addrs {
			id["ip"] += a.String()
		}
	}
	return json.NewEncoder(out).Encode(id)
}

// pour writes the output of a generator with a fixed seed.
func pour(args []string, out io.Writer) error {
	n, err := numbers(args[0])
	if err != nil {
		return err
	}
	_, err = io.CopyN(out, mathrand.NewChaCha8([32]byte{}), int64(n[0]))
	return err
}

// generators answers each connection with a draw of every generator of Go's that a long-lived process may use.
func generators(args []string, _ io.Writer) error {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp4", "127.0.0.1:"+args[0])
	if err != nil {
		return err
	}
	seeded := mathrand.New(mathrand.NewPCG(mathrand.Uint64(), mathrand.Uint64()))
	hash := maphash.MakeSeed()
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		_, _ = bufio.NewReader(c).ReadString('\n')
		var kernel [16]byte
		_, _ = rand.Read(kernel[:])
		_ = json.NewEncoder(c).Encode(map[string]string{
			"crypto/rand": fmt.Sprintf("%x", kernel), "math/rand/v2 seeded": fmt.Sprint(seeded.Uint64()),
			"maphash": fmt.Sprint(maphash.String(hash, "x")),
		})
		_ = c.Close()
	}
}
