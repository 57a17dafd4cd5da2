package hostcheck

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// inNamespace runs fn in a network namespace that ends with it.
func inNamespace(fn func() error) error {
	return osthread.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		return fn()
	})
}

// cureOf says the usual reason first.
func cureOf(err error, otherwise string) string {
	if errors.Is(err, os.ErrPermission) && os.Geteuid() != 0 {
		return cureRoot
	}
	return otherwise
}

func networkNamespaces(context.Context) Result {
	const name = "network-namespaces"
	if err := inNamespace(func() error { return nil }); err != nil {
		return fail(name, cureOf(err, "a kernel with CONFIG_NET_NS, and CAP_SYS_ADMIN in a container"), "%s", cause(err))
	}
	return ok(name, "a namespace was made")
}

// settings tries what is set in every namespace of a sandbox. An engine shows a container a /proc/sys that cannot be written.
func settings(context.Context) Result {
	const name = "network-settings"
	if err := inNamespace(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) }); err != nil {
		return fail(name, cureOf(err, "mount /proc so that it can be written; in a container, docker: --security-opt systempaths=unconfined"), "%s", cause(err))
	}
	return ok(name, "a setting of a fresh namespace was written")
}

func rules(context.Context) Result {
	const name = "nftables"
	if err := inNamespace(loadRules); err != nil {
		return fail(name, cureOf(err, "a kernel with nf_tables, its netdev and inet families, and connection tracking: modprobe nf_tables"), "%s", cause(err))
	}
	return ok(name, "a batch was loaded in a fresh namespace and read back")
}

// loadRules loads what a sandbox's rules consist of, in one batch: an ingress hook on a device, and a filter that
// asks connection tracking.
func loadRules() error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	drop := nftables.ChainPolicyDrop
	netdev := c.AddTable(&nftables.Table{Family: nftables.TableFamilyNetdev, Name: "coppice_doctor"})
	ingress := c.AddChain(&nftables.Chain{
		Name: "ingress", Table: netdev, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookIngress,
		Priority: nftables.ChainPriorityFilter, Device: "lo", Policy: &drop,
	})
	c.AddRule(&nftables.Rule{Table: netdev, Chain: ingress, Exprs: []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}})
	inet := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "coppice_doctor"})
	input := c.AddChain(&nftables.Chain{
		Name: "input", Table: inet, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput,
		Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	c.AddRule(&nftables.Rule{Table: inet, Chain: input, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1}, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept},
	}})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("load rules: %w", err)
	}
	for _, chain := range []*nftables.Chain{ingress, input} {
		got, err := c.GetRules(chain.Table, chain)
		if err != nil {
			return fmt.Errorf("read rules back: %w", err)
		}
		if len(got) != 1 {
			return fmt.Errorf("chain %s has %d rules after one was loaded", chain.Name, len(got))
		}
	}
	return nil
}

func tap(context.Context) Result {
	const name = "tap"
	if err := inNamespace(makeTap); err != nil {
		return fail(name, cureOf(err, "modprobe tun; in a container, pass /dev/net/tun in"), "%s", cause(err))
	}
	return ok(name, "a tap was made in a fresh namespace")
}

func makeTap() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/net/tun: %w", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("tap0")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return fmt.Errorf("make a tap: %w", err)
	}
	return nil
}
