package testpool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/hostcheck"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Config says what a pool is made of.
type Config struct {
	Dir        string // absolute, there, and open to the database's user. Everything is below it.
	Coppice    string // the program
	Images     string // image store
	PGBin      string // directory of PostgreSQL's programs; empty finds them
	Store      *tests3.Server
	Controller []string // further arguments
	Runner     []string // further arguments of every runner
}

// Pool is a pool that runs.
type Pool struct {
	Client     *coppice.Client
	Server     string // the API's URL
	Token      string // an administrator's
	Controller *Process
	Bucket     string

	cfg      Config
	database *pgcluster.Cluster
	port     string // of the controller's listener for runners
	hosts    []*Host
}

// Host is a runner on a host of its own.
type Host struct {
	*Process
	Link *Link // to where the controller and the store are

	ID    string // the runner's
	Mark  string // names everything that it makes on the host
	Data  string // its data directory
	Relay *Relay // between the runner and the store
}

// Open starts a database, a bucket and a controller. Close ends them.
func Open(ctx context.Context, cfg Config) (_ *Pool, err error) {
	p := &Pool{cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close(ctx))
		}
	}()
	binaries, err := pgcluster.Find(ctx, cfg.PGBin)
	if err != nil {
		return nil, err
	}
	if p.Bucket, err = cfg.Store.MakeBucket(ctx); err != nil {
		return nil, err
	}
	if p.database, err = pgcluster.Start(ctx, pgcluster.Config{Dir: filepath.Join(cfg.Dir, "pg"), Binaries: binaries, Log: slog.New(slog.DiscardHandler)}); err != nil {
		return nil, err
	}
	if p.port, err = freePort(ctx); err != nil {
		return nil, err
	}
	listen, err := freePort(ctx)
	if err != nil {
		return nil, err
	}
	key := filepath.Join(cfg.Dir, "api.key")
	p.Controller = p.process("controller", "", slices.Concat([]string{
		"--json", "controller", "--allow-weak-database=fsync,full_page_writes,synchronous_commit", "--database", p.database.DSN("postgres"), "--key-file", filepath.Join(cfg.Dir, "cluster.key"), "--api-key-file", key,
		"--listen", "127.0.0.1:" + listen, "--runner-listen", "0.0.0.0:" + p.port, "--store", cfg.Store.URL(p.Bucket),
	}, cfg.Controller))
	if err := p.Controller.Start(ctx); err != nil {
		return nil, err
	}
	token, err := os.ReadFile(key)
	if err != nil {
		return nil, err
	}
	p.Server, p.Token = p.Controller.ready.Server, strings.TrimSpace(string(token))
	p.Client, err = coppice.New(coppice.Config{Server: p.Server, Token: p.Token})
	return p, err
}

// freePort is one that was free a moment ago: every host reaches this machine at another address, so the listener is for all of them.
func freePort(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "0.0.0.0:0")
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, errors.Join(err, l.Close())
}

func (p *Pool) process(name, netns string, args []string) *Process {
	return &Process{
		Name: name, Log: filepath.Join(p.cfg.Dir, name+".log"), Args: args, binary: p.cfg.Coppice, netns: netns,
		env: []string{"COPPICE_STORE_ACCESS_KEY=" + p.cfg.Store.AccessKey, "COPPICE_STORE_SECRET_KEY=" + p.cfg.Store.SecretKey},
	}
}

// Join adds a host, whose runner has further arguments besides those of all.
func (p *Pool) Join(ctx context.Context, more ...string) (_ *Host, err error) {
	name := fmt.Sprintf("runner-%d", len(p.hosts))
	h := &Host{Data: filepath.Join(p.cfg.Dir, name)}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.Leave())
		}
	}()
	if h.Link, err = NewLink(); err != nil {
		return nil, err
	}
	p.hosts = append(p.hosts, h)
	if h.Relay, err = NewRelay(ctx, h.Link.Near+":0", p.cfg.Store.Address); err != nil {
		return nil, err
	}
	ticket, err := p.Client.CreateRunnerToken(ctx, coppice.CreateRunnerTokenRequest{})
	if err != nil {
		return nil, err
	}
	token := filepath.Join(p.cfg.Dir, name+".token")
	if err := os.WriteFile(token, []byte(ticket.Token+"\n"), 0o600); err != nil {
		return nil, err
	}
	h.Process = p.process(name, h.Link.Path, slices.Concat([]string{
		"--json", "runner", "--data-dir", h.Data, "--images-dir", p.cfg.Images, "--controller", "https://" + net.JoinHostPort(h.Link.Near, p.port),
		"--join-token-file", token, "--listen", h.Link.Far + ":7072", "--stop-vms",
		"--allow-weak-host", strings.Join(hostcheck.IsolationNames(), ","), // guests of tests trust each other
		"--store", fmt.Sprintf("s3://%s?endpoint=http://%s&region=%s&insecure=1", p.Bucket, h.Relay.Address(), tests3.Region),
	}, p.cfg.Runner, more))
	if err := h.Start(ctx); err != nil {
		return nil, err
	}
	h.ID = h.ready.RunnerID
	h.Mark = p.Controller.ready.ClusterID + "/" + h.ID
	return h, nil
}

// Leave ends a host in order: the successor of a runner that was killed takes down what that left.
func (h *Host) Leave() error {
	var errs []error
	if h.Process != nil && h.cmd != nil {
		if !h.Lives() {
			ctx, cancel := context.WithTimeout(context.Background(), stopTime)
			errs = append(errs, h.Start(ctx))
			cancel()
		}
		errs = append(errs, h.Stop())
		h.cmd = nil
	}
	if h.Relay != nil {
		errs = append(errs, h.Relay.Close())
		h.Relay = nil
	}
	if h.Link != nil {
		errs = append(errs, h.Link.Close())
	}
	return errors.Join(errs...)
}

// Close ends everything. The directory stays.
func (p *Pool) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
	defer cancel()
	var errs []error
	for _, h := range p.hosts {
		errs = append(errs, h.Leave())
	}
	if p.Controller != nil {
		errs = append(errs, p.Controller.Stop())
	}
	if p.Client != nil {
		p.Client.Close()
	}
	if p.database != nil {
		errs = append(errs, p.database.Remove(ctx))
	}
	return errors.Join(errs...)
}
