// Package server has the commands that run servers: all of them on one machine, a controller, a runner and its side processes.
package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"

	"github.com/spf13/pflag"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/exit"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/internal/devstack"
	"github.com/coppice-dev/coppice/internal/imageref"
	"github.com/coppice-dev/coppice/runner/hostport"
)

func vmmFlags(f *pflag.FlagSet, cfg *daemon.HostConfig) {
	f.StringVar(&cfg.VMM, "vmm", cfg.VMM, "qemu, cloud-hypervisor, or auto: cloud-hypervisor if a guest really boots under it (COPPICE_VMM)")
	f.StringVar(&cfg.Accelerator, "accel", cfg.Accelerator, "tcg, kvm, or auto: kvm if a guest really boots under it (COPPICE_ACCEL)")
}

// logFlags are the flags of every server for its log.
func logFlags(f *pflag.FlagSet, level, format *string) {
	f.StringVar(level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(format, "log-format", autoFormat, "text: short lines for people; json: everything; auto: text on a terminal, json elsewhere")
}

// The values of --log-format.
const (
	autoFormat = "auto"
	textFormat = "text"
	jsonFormat = "json"
)

// newLogger writes for people or for programs; auto: for people on a terminal.
func newLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("--log-level %q is not debug, info, warn or error", core.Clip(level))
	}
	switch format {
	case autoFormat:
		format = jsonFormat
		if f, ok := w.(*os.File); ok {
			if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
				format = textFormat
			}
		}
	case textFormat, jsonFormat:
	default:
		return nil, fmt.Errorf("--log-format %q is not auto, text or json", core.Clip(format))
	}
	if format == textFormat {
		return slog.New(newReadable(w, l)), nil
	}
	return slog.New(core.LogHandler(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l}))), nil
}

// storeFlags are the flags of every server for the store. The credentials come from files or the environment, never from the command line.
func storeFlags(a *cli.App, f *pflag.FlagSet, cfg *daemon.StoreConfig) {
	cfg.AccessKey, cfg.SecretKey = a.Getenv("COPPICE_STORE_ACCESS_KEY"), a.Getenv("COPPICE_STORE_SECRET_KEY")
	f.StringVar(&cfg.URL, "store", a.Getenv("COPPICE_STORE"), "`URL` of the store that makes checkpoints durable, the same for all servers of a cluster: dir:/path or s3://bucket/prefix?endpoint=https://host&region=name (default: none; checkpoints stay on their host)")
	f.StringVar(&cfg.AccessKeyFile, "store-access-key-file", a.Getenv("COPPICE_STORE_ACCESS_KEY_FILE"), "`file` with the store's access key, instead of COPPICE_STORE_ACCESS_KEY")
	f.StringVar(&cfg.SecretKeyFile, "store-secret-key-file", a.Getenv("COPPICE_STORE_SECRET_KEY_FILE"), "`file` with the store's secret key, instead of COPPICE_STORE_SECRET_KEY; both files are read again when the store refuses the keys")
}

// e2bFlags adds the flags of the layer for E2B's clients.
func e2bFlags(f *pflag.FlagSet, cfg *daemon.E2BConfig, listen string) {
	f.StringVar(&cfg.Listen, "e2b-listen", "", "serve E2B's clients on this `address`"+listen)
	f.StringVar(&cfg.Domain, "e2b-domain", "", "the `name` whose subdomains lead to --e2b-listen, for <port>-<sandbox>.NAME")
	f.StringVar(&cfg.User, "e2b-user", "", "the `user` of the guest for E2B's clients that name none (default root)")
	f.BoolVar(&cfg.OpenEgress, "e2b-open-egress", false, "sandboxes of E2B's clients reach everything unless the client asks for no internet access (needs allow-all egress)")
}

// arrakisFlags adds the flags of the layer for Arrakis' clients.
func arrakisFlags(f *pflag.FlagSet, cfg *daemon.ArrakisConfig, listen, ports string) {
	f.StringVar(&cfg.Listen, "arrakis-listen", "", "serve Arrakis' clients on this `address`"+listen)
	f.StringVar(&cfg.Image, "arrakis-image", "", "the `image` of new VMs of Arrakis' clients (default base)")
	f.StringVar(&cfg.Ports, "arrakis-ports", ports, "the `ports` of each VM of Arrakis' clients that the runner's host forwards, as 5901=gui,5736-5740=code")
	f.BoolVar(&cfg.OpenEgress, "arrakis-open-egress", false, "new VMs of Arrakis' clients reach everything (needs allow-all egress)")
}

// devFlags adds the flags of `coppice dev` for the calls of Arbor and for pulls.
func devFlags(f *pflag.FlagSet, cfg *devstack.Config) {
	registryFlag(f, &cfg.ImageRegistries, imageref.Public)
	f.StringVar(&cfg.Arbor.Listen, "arbor-listen", "", "serve Arbor's clients on this `address` (default 127.0.0.1:7077, or a free port if --listen does not have port 7070); - for none")
	f.BoolVar(&cfg.ArborNeedsKey, "arbor-require-key", false, "requests of Arbor's clients need a key; without this flag they need none, and --arbor-listen must be on loopback")
}

// secretFlags are the flags of servers with a controller for secrets.
func secretFlags(a *cli.App, f *pflag.FlagSet, cfg *daemon.SecretsConfig, env bool) {
	cfg.Lookup = func(name string) (string, bool) {
		value := a.Getenv(name)
		return value, value != ""
	}
	v := &cfg.Vault
	f.StringVar(&v.Address, "vault-addr", "", "`URL` of a HashiCorp Vault, https://host:port; grants may name secrets in it (vault://mount/path#field)")
	f.StringVar(&v.CAFile, "vault-ca-file", "", "`file` with the certificate authorities of the Vault, in PEM (default: the system's)")
	f.StringVar(&v.Namespace, "vault-namespace", "", "`namespace` in the Vault")
	f.StringVar(&v.Prefix, "vault-prefix", "secret/coppice/{project}/", "`path` above the secrets of a project, with {project} for the project's id; the controller reads no others")
	f.StringVar(&v.TokenFile, "vault-token-file", "", "log in to the Vault with the token in this `file`, which is read again each time")
	f.StringVar(&v.RoleIDFile, "vault-role-id-file", "", "log in to the Vault by AppRole with the role id in this `file`; needs --vault-secret-id-file")
	f.StringVar(&v.SecretIDFile, "vault-secret-id-file", "", "`file` with the secret id for --vault-role-id-file")
	f.StringVar(&v.KubernetesRole, "vault-kubernetes-role", "", "log in to the Vault by Kubernetes with this `role`")
	f.StringVar(&v.KubernetesTokenFile, "vault-kubernetes-token-file", "", "`file` with the service account's token for --vault-kubernetes-role (default: where Kubernetes puts it)")
	f.StringVar(&v.AuthMount, "vault-auth-mount", "", "`path` at which the Vault has the login mounted (default: approle or kubernetes)")
	f.BoolVar(&cfg.Env, "secret-env", env, "for development: let grants of every project use variables of this process that begin with COPPICE_SECRET_ (env://COPPICE_SECRET_NAME)")
}

// hostStoreFlags are the flags of servers with a runner for the store. The returned function reads them.
func hostStoreFlags(f *pflag.FlagSet, cfg *daemon.StoreConfig) func() error {
	var bandwidth, cache, copies, floor, fetch string
	f.StringVar(&bandwidth, "store-bandwidth", "", "maximum upload to the store per second, as `size` with K, M, G or T (default: no limit)")
	f.StringVar(&cache, "cache-size", "10G", "maximum size of this host's cache of the store, as `size` with K, M, G or T; 0 for no cache")
	f.StringVar(&copies, "copies-size", "", "maximum disk space for checkpoints that were fetched from the store, as `size` with K, M, G or T (default: half of the disk)")
	f.StringVar(&floor, "disk-floor", "", "free disk space that fetches of checkpoints never use, as `size` with K, M, G or T (default: a sixteenth of the disk, at most 4G)")
	f.StringVar(&fetch, "fetch", "lazy", "how to fetch a checkpoint from the store: lazy (its VMs run before all of their memory has arrived) or whole")
	return func() (err error) {
		if fetch != "lazy" && fetch != "whole" {
			return exit.Misuse(fmt.Errorf("--fetch: %q is neither lazy nor whole", fetch))
		}
		cfg.Whole = fetch == "whole"
		if cfg.Bandwidth, err = parseSizeOr(bandwidth, ""); err != nil {
			return exit.Misuse(fmt.Errorf("--store-bandwidth: %w", err))
		}
		if cfg.CacheSize, err = parseSizeOr(cache, "0"); err != nil {
			return exit.Misuse(fmt.Errorf("--cache-size: %w", err))
		}
		if cfg.CopiesSize, err = parseSizeOr(copies, ""); err != nil {
			return exit.Misuse(fmt.Errorf("--copies-size: %w", err))
		}
		if cfg.Floor, err = parseSizeOr(floor, ""); err != nil {
			return exit.Misuse(fmt.Errorf("--disk-floor: %w", err))
		}
		return nil
	}
}

// egressFlags are the flags of servers with a runner for egress. The returned function reads them.
func egressFlags(f *pflag.FlagSet, cfg *daemon.EgressOptions) func() error {
	var mode string
	var private []string
	f.StringVar(&mode, "egress", "on", "on: sandboxes may send what the rules of their workspace allow, through an egress process of this host; off: they may send nothing")
	f.StringArrayVar(&private, "egress-allow-private", nil, "`network` in CIDR form that is not public; sandboxes may reach its hosts if their rules name them; may be repeated")
	f.StringVar(&cfg.CAFile, "egress-ca-file", "", "PEM `file` with further certificate authorities to trust for the hosts of grants")
	f.StringVar(&cfg.Resolver, "egress-resolver", "", "`address` of the name server for names outside, host:port (default: that of this host)")
	return func() error {
		if mode != "on" && mode != "off" {
			return exit.Misuse(fmt.Errorf("--egress: %q is neither on nor off", mode))
		}
		cfg.Off = mode == "off"
		for _, text := range private {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				return exit.Misuse(fmt.Errorf("--egress-allow-private: %w", err))
			}
			cfg.Private = append(cfg.Private, p.Masked())
		}
		return nil
	}
}

// forwardFlags are the flags of servers with a runner for forwarded ports. The returned function reads them.
func forwardFlags(f *pflag.FlagSet, cfg *hostport.Allowed) func() error {
	var addresses []string
	var ports, bind string
	f.StringArrayVar(&addresses, "forward-address", nil, "`IP` address of this host on which tenants may forward ports; may be repeated; a request without an address gets the first one (default: 127.0.0.1 and ::1)")
	f.StringVar(&ports, "forward-ports", "", "range of `ports` that tenants may use for forwarding, FIRST-LAST from 1024 up; narrow it on a host with other services (default: from 1024 up to the ports of outgoing connections, usually 1024-32767)")
	f.StringVar(&bind, "forward-bind", "", "listen on this `IP` address instead of those of --forward-address. For a container: 0.0.0.0, if the engine publishes the ports at --forward-address (default: none)")
	return func() (err error) {
		if *cfg, err = hostport.Parse(addresses, ports); err != nil {
			return exit.Misuse(fmt.Errorf("--forward-address, --forward-ports: %w", err))
		}
		if cfg.Bind, err = hostport.ParseBind(bind); err != nil {
			return exit.Misuse(fmt.Errorf("--forward-bind: %w", err))
		}
		if cfg.Bind.IsValid() && len(addresses) != 1 { // tenants are told this address
			return exit.Misuse(errors.New("--forward-bind needs exactly one --forward-address: where clients reach the ports"))
		}
		return nil
	}
}

// parseSizeOr reads a size, or the word that stands for zero.
func parseSizeOr(s, none string) (int64, error) {
	if s == none {
		return 0, nil
	}
	return argument.Size(s)
}

// previewFlags adds the flags of previews.
func previewFlags(f *pflag.FlagSet, cfg *daemon.PreviewConfig, listen, domain string) {
	f.StringVar(&cfg.Listen, "preview-listen", "", "serve previews on this `address`"+listen)
	f.StringVar(&cfg.Domain, "preview-domain", domain, "the `name` whose subdomains lead to --preview-listen, for <port>-<workspace>.NAME; NAME:PORT if URLs have another port")
}

// previewTLSFlags adds those of their certificates.
func previewTLSFlags(f *pflag.FlagSet, cfg *daemon.PreviewConfig) {
	f.StringVar(&cfg.TLSCert, "preview-tls-cert", "", "certificate `file` of previews, in PEM, for *.NAME; read again when it changes")
	f.StringVar(&cfg.TLSKey, "preview-tls-key", "", "`file` with the key of that certificate, in PEM")
	f.StringSliceVar(&cfg.Proxies, "preview-proxy", nil, "`networks` of the proxies in front of --preview-listen; their X-Forwarded-For says who the client is, for the bounds of each address")
	f.StringSliceVar(&cfg.ACMEHosts, "preview-acme-host", nil, "get certificates by ACME (tls-alpn-01) for these `names` of previews, and for no others; --preview-listen must be reachable at port 443")
	f.StringVar(&cfg.ACMECache, "preview-acme-cache", "", "`directory` that keeps those certificates and their keys")
	f.StringVar(&cfg.ACMEDirectory, "preview-acme-directory", "", "`URL` of the ACME authority (default: Let's Encrypt)")
}

// registryFlag says from which registries projects may pull images.
func registryFlag(f *pflag.FlagSet, list *[]string, usual ...string) {
	f.StringSliceVar(list, "image-registry", usual, "registry from which builds may pull images, as `HOST[:PORT]`, or http://HOST[:PORT] without TLS, or public for all at public addresses; may be repeated")
}
