package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/testprog"
	"github.com/coppice-dev/coppice/runner/vmm/cloudhypervisor"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
)

const ch = cloudhypervisor.DriverName

// oneHost is what a probe finds on a host that does not exist.
type oneHost struct {
	kvm     error  // why KVM cannot be used, by its device
	noImage bool   //
	noCH    error  // why cloud-hypervisor cannot be used
	boots   string // the VMMs under which a guest boots
	booted  []string
}

func (h *oneHost) probe(t *testing.T) *probe {
	t.Helper()
	program := filepath.Join(t.TempDir(), "vmm")
	testprog.Write(t, program, []byte("#!/bin/sh\n"))
	return &probe{
		usable: func() error { return h.kvm },
		image:  func() (images.Image, bool) { return images.Image{Digest: "sha256:one"}, !h.noImage },
		find: func(_ context.Context, name string) (string, string, error) {
			if name == ch && h.noCH != nil {
				return "", "", h.noCH
			}
			return program, "1.0", nil
		},
		boot: func(_ context.Context, name, _ string, _ images.Image, limit time.Duration) (bool, string) {
			h.booted = append(h.booted, fmt.Sprintf("%s within %s", name, limit))
			if strings.Contains(h.boots, name) {
				return true, name + " booted a guest"
			}
			return false, name + " booted nothing"
		},
		limit: probeTime,
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	absent := core.Errorf(core.FailedPrecondition, core.CodeVMMFailed, "cloud-hypervisor is not installed; run `make setup-kvm`")
	noKVM := errors.New("there is no /dev/kvm")
	both := "qemu cloud-hypervisor"
	for name, c := range map[string]struct {
		host       oneHost
		vmm, accel string
		want       choice
		code       core.Code
		refusal    string
		booted     []string
	}{
		"both boot":                      {host: oneHost{boots: both}, want: choice{ch, "kvm", ch + " booted a guest"}, booted: []string{ch + " within 15s"}},
		"both boot, auto":                {host: oneHost{boots: both}, vmm: "auto", accel: "auto", want: choice{ch, "kvm", ch + " booted a guest"}, booted: []string{ch + " within 15s"}},
		"cloud-hypervisor is not there":  {host: oneHost{boots: "qemu", noCH: absent}, want: choice{"qemu", "kvm", "qemu booted a guest; not cloud-hypervisor: cloud-hypervisor is not installed; run `make setup-kvm`"}, booted: []string{"qemu within 15s"}},
		"only QEMU boots":                {host: oneHost{boots: "qemu"}, want: choice{"qemu", "kvm", "qemu booted a guest; not cloud-hypervisor: cloud-hypervisor booted nothing"}, booted: []string{ch + " within 15s", "qemu within 15s"}},
		"nothing boots":                  {want: choice{"qemu", "tcg", "KVM does not run a guest here: qemu booted nothing; not cloud-hypervisor: cloud-hypervisor booted nothing"}, booted: []string{ch + " within 15s", "qemu within 15s"}},
		"nothing boots, no other":        {host: oneHost{noCH: absent}, want: choice{"qemu", "tcg", "KVM does not run a guest here: qemu booted nothing; not cloud-hypervisor: " + absent.Msg}, booted: []string{"qemu within 15s"}},
		"no KVM":                         {host: oneHost{boots: both, kvm: noKVM}, want: choice{"qemu", "tcg", "there is no /dev/kvm"}},
		"no image":                       {host: oneHost{boots: both, noImage: true}, want: choice{"qemu", "tcg", "/dev/kvm proves nothing, and there is no image yet to boot under it"}},
		"QEMU":                           {host: oneHost{boots: both}, vmm: "qemu", want: choice{"qemu", "kvm", "qemu booted a guest"}, booted: []string{"qemu within 15s"}},
		"QEMU boots nothing":             {host: oneHost{boots: ch}, vmm: "qemu", want: choice{"qemu", "tcg", "KVM does not run a guest here: qemu booted nothing"}, booted: []string{"qemu within 15s"}},
		"QEMU with KVM":                  {host: oneHost{kvm: noKVM}, vmm: "qemu", accel: "kvm", want: choice{"qemu", "kvm", "as asked"}},
		"QEMU without":                   {host: oneHost{boots: both}, vmm: "qemu", accel: "tcg", want: choice{"qemu", "tcg", "as asked"}},
		"emulation":                      {host: oneHost{boots: both}, accel: "tcg", want: choice{"qemu", "tcg", "as asked"}},
		"KVM":                            {host: oneHost{boots: both}, accel: "kvm", want: choice{ch, "kvm", ch + " booted a guest"}, booted: []string{ch + " within 15s"}},
		"KVM, only QEMU boots":           {host: oneHost{boots: "qemu"}, accel: "kvm", want: choice{"qemu", "kvm", "KVM as asked; not cloud-hypervisor: cloud-hypervisor booted nothing"}, booted: []string{ch + " within 15s"}},
		"KVM, and there is none":         {host: oneHost{kvm: noKVM}, accel: "kvm", want: choice{"qemu", "kvm", "KVM as asked; not cloud-hypervisor: there is no /dev/kvm"}},
		"cloud-hypervisor":               {host: oneHost{boots: ch}, vmm: ch, want: choice{ch, "kvm", "as asked; cloud-hypervisor booted a guest"}, booted: []string{ch + " within 2m0s"}},
		"cloud-hypervisor with KVM":      {host: oneHost{boots: ch}, vmm: ch, accel: "kvm", want: choice{ch, "kvm", "as asked; cloud-hypervisor booted a guest"}, booted: []string{ch + " within 2m0s"}},
		"cloud-hypervisor, no image":     {host: oneHost{noImage: true}, vmm: ch, want: choice{ch, "kvm", "as asked; there is no image yet to boot under it"}},
		"cloud-hypervisor, absent":       {host: oneHost{boots: "qemu", noCH: absent}, vmm: ch, code: core.CodeIncompatibleHost, refusal: absent.Msg},
		"cloud-hypervisor, no KVM":       {host: oneHost{boots: both, kvm: noKVM}, vmm: ch, code: core.CodeIncompatibleHost, refusal: "there is no /dev/kvm"},
		"cloud-hypervisor boots nothing": {host: oneHost{boots: "qemu"}, vmm: ch, code: core.CodeIncompatibleHost, refusal: "cloud-hypervisor booted nothing", booted: []string{ch + " within 2m0s"}},
		"a contradiction":                {host: oneHost{boots: both}, vmm: ch, accel: "tcg", code: core.CodeInvalidField, refusal: "--vmm cloud-hypervisor and --accel tcg contradict one another"},
		"no such VMM":                    {vmm: "bochs", code: core.CodeInvalidField, refusal: `the VMM is "bochs"; it must be one of: auto, qemu, cloud-hypervisor`},
		"no such accelerator":            {accel: "hvf", code: core.CodeInvalidField, refusal: `the accelerator is "hvf"; it must be one of: auto, tcg, kvm`},
	} {
		got, err := choose(t.Context(), c.vmm, c.accel, c.host.probe(t))
		if got != c.want || core.CodeOf(err) != c.code || !strings.Contains(core.MessageOf(err), c.refusal) {
			t.Errorf("%s: got %+v, %v; want %+v, %s %q", name, got, err, c.want, c.code, c.refusal)
		}
		if !slices.Equal(c.host.booted, c.booted) {
			t.Errorf("%s: %q were booted, want %q", name, c.host.booted, c.booted)
		}
	}
}

// TestProbesAreKept: what was found is believed by the next start, as long as it is the same program, image and boot of the host; a failure not by
// who asks for the VMM by name, and what was interrupted never.
func TestProbesAreKept(t *testing.T) {
	t.Parallel()
	h := oneHost{}
	p := h.probe(t)
	p.kept = filepath.Join(t.TempDir(), "data", probeFile)
	version, digest := "1.0", core.Digest("sha256:one")
	program, _, _ := p.find(t.Context(), ch)
	p.find = func(context.Context, string) (string, string, error) { return program, version, nil }
	p.image = func() (images.Image, bool) { return images.Image{Digest: digest}, true }
	step := func(what string, want choice, boots ...string) {
		t.Helper()
		h.booted = nil
		got, err := choose(t.Context(), "", "", p)
		if err != nil || got.vmm != want.vmm || got.accelerator != want.accelerator || !slices.Equal(h.booted, boots) {
			t.Errorf("%s: got %+v, %v with %q booted; want %+v with %q", what, got, err, h.booted, want, boots)
		}
	}
	tcg, kvm, best := choice{vmm: "qemu", accelerator: "tcg"}, choice{vmm: "qemu", accelerator: "kvm"}, choice{vmm: ch, accelerator: "kvm"}
	step("first", tcg, ch+" within 15s", "qemu within 15s")
	h.boots = "qemu"
	step("again", tcg)
	digest = "sha256:two"
	step("another image", kvm, ch+" within 15s", "qemu within 15s")
	h.boots = ""
	step("again", kvm)
	h.boots = "qemu cloud-hypervisor"
	version = "1.1"
	step("another version", best, ch+" within 15s")
	h.boots = ""
	step("again", best)
	if err := os.Chtimes(program, time.Time{}, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	step("another program", tcg, ch+" within 15s", "qemu within 15s")

	h.boots = ch
	if got, err := choose(t.Context(), ch, "", p); err != nil || got.vmm != ch {
		t.Errorf("by name, after a failure: %+v, %v", got, err)
	}
	p.again, p.limit = false, probeTime
	h.boots = ""
	step("after that", best)

	digest = "sha256:three"
	ctx, cancel := context.WithCancel(t.Context())
	boot := p.boot
	p.boot = func(context.Context, string, string, images.Image, time.Duration) (bool, string) {
		cancel()
		return false, "given up"
	}
	if got, err := choose(ctx, "", "", p); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %+v, %v", got, err)
	}
	p.boot = boot
	h.boots = ch
	step("after an interruption", best, ch+" within 15s")

	b, err := os.ReadFile(p.kept)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p.kept, []byte(strings.Replace(string(b), `"boot_id": "`, `"boot_id": "x`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	step("another boot of the host", best, ch+" within 15s")
	if err := os.WriteFile(p.kept, []byte(`{"boot_id":"`), 0o600); err != nil {
		t.Fatal(err)
	}
	step("a damaged file", best, ch+" within 15s")
}

// TestDriversOfHost: a runner has a driver for what it starts, and one for what an earlier one may have left.
func TestDriversOfHost(t *testing.T) {
	t.Parallel()
	version := func(says string) string {
		path := filepath.Join(t.TempDir(), "qemu-system-x86_64")
		testprog.Write(t, path, []byte("#!/bin/sh\necho "+says+"\n"))
		return path
	}
	c := HostConfig{Binary: version("QEMU emulator version 10.0.2"), CloudHypervisor: version("cloud-hypervisor v53.0"), Why: "a reason"}
	for _, want := range []struct{ vmm, accelerator, version, other string }{{qemu.DriverName, "tcg", "10.0.2", ch}, {ch, "kvm", "53.0", qemu.DriverName}} {
		c.VMM, c.Accelerator = want.vmm, want.accelerator
		driver, others := c.Drivers()
		fp, err := driver.Fingerprint(t.Context())
		if err != nil || fp.VMM != want.vmm || fp.Version != want.version || fp.Accelerator != want.accelerator || fp.Detail != "a reason" {
			t.Errorf("%s: %+v, %v", want.vmm, fp, err)
		}
		if len(others) != 1 || others[want.other] == nil {
			t.Errorf("%s: the others are %v", want.vmm, others)
		}
	}
}

// TestChooseVMM finds programs by name, and says what it found as people read it.
func TestChooseVMM(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testprog.Write(t, filepath.Join(dir, "ch"), []byte("#!/bin/sh\necho cloud-hypervisor v12.0\n"))
	relative, err := filepath.Rel(mustWD(t), filepath.Join(dir, "ch"))
	if err != nil {
		t.Fatal(err)
	}
	c := HostConfig{DataDir: dir, VMM: ch, CloudHypervisor: relative}
	if err := c.ChooseVMM(t.Context()); core.CodeOf(err) != core.CodeIncompatibleHost || !strings.Contains(core.MessageOf(err), "12.0") || !strings.Contains(core.MessageOf(err), "make setup-kvm") {
		t.Errorf("an old cloud-hypervisor: %v", err)
	}
	if c.CloudHypervisor != filepath.Join(dir, "ch") {
		t.Errorf("its path is %q", c.CloudHypervisor)
	}
	c = HostConfig{DataDir: dir, Accelerator: "tcg"}
	if err := c.ChooseVMM(t.Context()); err != nil || c.VMMText() != "QEMU, tcg (as asked)" {
		t.Errorf("%s, %v", c.VMMText(), err)
	}
}

func mustWD(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
