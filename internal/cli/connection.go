package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	"github.com/coppice-dev/coppice/internal/cli/connections"
	"github.com/coppice-dev/coppice/internal/cli/exit"
)

// Connection has the address of the server and the API key for it. `coppice dev` enters its own in the connection
// file, so that the client commands of the same user need no flags.
type Connection struct {
	Server string
	Token  string
	Origin string // where the address came from, for people
}

// errNoServer says how to get one.
var errNoServer = errors.New("no server is configured: start one with `coppice dev`, or set --server and --token (COPPICE_SERVER, and COPPICE_TOKEN or COPPICE_TOKEN_FILE), or add one with `coppice context add`")

// Connection says which server and which key the flags, the environment or the connection file name.
func (a *App) Connection() (Connection, error) { return a.connection() }

// connection finds the server and its key. The flags win over the environment, and the environment over the connection file. A key goes only to the
// server that it belongs to: that of a context to the context's server, that of the environment to COPPICE_SERVER or, where that is not set,
// to --server or the `coppice dev` that is the current context.
func (a *App) connection() (Connection, error) {
	if a.server != "" && a.context != "" {
		return Connection{}, exit.Misuse(errors.New("--server and --context exclude each other"))
	}
	if server := cmp.Or(a.server, a.unlessContext(a.Getenv("COPPICE_SERVER"))); server != "" {
		return a.toServer(server)
	}
	file, path, err := a.Contexts()
	if err != nil {
		return Connection{}, err
	}
	if name := cmp.Or(a.context, a.Getenv("COPPICE_CONTEXT")); name != "" {
		e, ok := file.Contexts[name]
		if !ok {
			return Connection{}, exit.Misuse(fmt.Errorf("there is no context %q; list the contexts with coppice context ls", core.Clip(name)))
		}
		return Connection{Server: e.Server, Token: cmp.Or(a.token, e.Token), Origin: "context " + name + " in " + path}, nil
	}
	e, ok := file.Contexts[file.Current]
	switch {
	case ok:
	case len(file.Contexts) > 0:
		return Connection{}, fmt.Errorf("no context is current, because its server has ended or it was removed; choose one with coppice context use: coppice context ls (in %s)", path)
	default:
		return Connection{}, errNoServer
	}
	c := Connection{Server: e.Server, Token: a.token, Origin: "context " + file.Current + " in " + path}
	if c.Token == "" && e.DataDir != "" {
		if c.Token, err = a.tokenOfEnvironment(); err != nil {
			return Connection{}, err
		}
	}
	c.Token = cmp.Or(c.Token, e.Token)
	return c, nil
}

// unlessContext drops an address of the environment where --context names another.
func (a *App) unlessContext(server string) string {
	if a.context != "" {
		return ""
	}
	return server
}

// toServer is the connection to a server that was named by its address.
func (a *App) toServer(server string) (c Connection, err error) {
	c = Connection{Server: server, Token: a.token, Origin: "--server"}
	if a.server == "" {
		c.Origin = "COPPICE_SERVER"
	}
	if c.Server, err = CompleteAddress(server); err != nil {
		return Connection{}, exit.Misuse(fmt.Errorf("%s: %w", c.Origin, err))
	}
	belongs := a.Getenv("COPPICE_SERVER") // where the key of the environment belongs, if it says
	if complete, err := CompleteAddress(belongs); err == nil {
		belongs = complete
	}
	if c.Token == "" && (belongs == "" || belongs == c.Server) {
		if c.Token, err = a.tokenOfEnvironment(); err != nil {
			return Connection{}, err
		}
	}
	if c.Token == "" {
		file, _, err := a.Contexts()
		if err != nil {
			return Connection{}, err
		}
		c.Token = file.TokenFor(c.Server)
	}
	return c, nil
}

// errNoAddress does not repeat the address: it may have a password in it.
var errNoAddress = errors.New("that is no address of a server: give https://HOST[:PORT], http://HOST:PORT or unix:///PATH")

// CompleteAddress puts http:// before HOST:PORT on loopback. On other hosts a person must say whether the key goes in clear.
func CompleteAddress(server string) (string, error) {
	if strings.Contains(server, "://") {
		if _, err := url.Parse(server); err != nil {
			return "", errNoAddress
		}
		return server, nil
	}
	host, _, err := net.SplitHostPort(server)
	if err != nil {
		return "", errNoAddress
	}
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return "http://" + server, nil
	}
	return "", fmt.Errorf("%q does not say how to speak to that host: give https://%s, or http://%s where nobody can listen in", core.Clip(server), core.Clip(server), core.Clip(server))
}

// ShownAddress is the address of a server for people: without a password or a token, which a URL may have.
func ShownAddress(server string) string {
	u, err := url.Parse(server)
	if err != nil || u.Scheme == "" {
		return "an address that cannot be read"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

func (a *App) tokenOfEnvironment() (string, error) {
	if token := a.Getenv("COPPICE_TOKEN"); token != "" {
		return token, nil
	}
	file := a.Getenv("COPPICE_TOKEN_FILE")
	if file == "" {
		return "", nil
	}
	token, err := argument.Secret(file)
	if err != nil {
		return "", fmt.Errorf("COPPICE_TOKEN_FILE: %w", err)
	}
	return token, nil
}

// Contexts reads the connection file. It also returns its path.
func (a *App) Contexts() (connections.File, string, error) {
	path, err := a.connectionFile()
	if errors.Is(err, errNoHome) {
		return connections.File{}, "", nil
	}
	if err != nil {
		return connections.File{}, "", err
	}
	file, err := connections.Read(path)
	return file, path, err
}

// ChangeContexts changes the connection file.
func (a *App) ChangeContexts(change func(*connections.File) error) error {
	path, err := a.connectionFile()
	if err != nil {
		return err
	}
	return connections.Change(path, change)
}

// EnterContext enters the server of a `coppice dev` in the connection file. The function that it returns takes the entry away. current says
// whether client commands use this server from now on.
func (a *App) EnterContext(e connections.Entry) (name string, current bool, leave func() error, err error) {
	err = a.ChangeContexts(func(f *connections.File) error {
		name = f.Enter(e, answers)
		current = f.Current == name
		return nil
	})
	if err != nil {
		return "", false, func() error { return nil }, err
	}
	return name, current, func() error {
		return a.ChangeContexts(func(f *connections.File) error {
			f.Leave(name, e)
			return nil
		})
	}, nil
}

// answers reports whether something listens at the address of a `coppice dev`, which is on this machine.
func answers(e connections.Entry) bool {
	u, err := url.Parse(e.Server)
	if err != nil || u.Host == "" {
		return false
	}
	d := net.Dialer{Timeout: 2 * time.Second}
	conn, err := d.DialContext(context.Background(), "tcp", u.Host)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

var errNoHome = errors.New("HOME is not set, so there is no connection file; set HOME or COPPICE_CONNECTION")

// connectionFile is $COPPICE_CONNECTION, else coppice/connection.json in the user's configuration directory.
func (a *App) connectionFile() (string, error) {
	if path := a.Getenv("COPPICE_CONNECTION"); path != "" {
		return path, nil
	}
	dir := a.Getenv("XDG_CONFIG_HOME")
	if dir == "" {
		home := a.Getenv("HOME")
		if home == "" {
			return "", errNoHome
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "coppice", "connection.json"), nil
}
