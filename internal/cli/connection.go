package cli

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/cli/argument"
)

// Connection has the address of the server and the API key for it. `coppice dev` saves its own in the connection
// file, so that the client commands of the same user need no flags.
type Connection struct {
	Server string `json:"server"`
	Token  string `json:"token"`
}

// errNoServer says how to get one.
var errNoServer = errors.New("no server is configured: start one with `coppice dev`, or set --server and --token (COPPICE_SERVER, and COPPICE_TOKEN or COPPICE_TOKEN_FILE)")

// connection takes each value from the flags, else from the environment, else from the connection file. It sends a key
// from the file only to the server of the file.
func (a *App) connection() (Connection, error) {
	c := Connection{Server: cmp.Or(a.server, a.Getenv("COPPICE_SERVER")), Token: cmp.Or(a.token, a.Getenv("COPPICE_TOKEN"))}
	if file := a.Getenv("COPPICE_TOKEN_FILE"); c.Token == "" && file != "" {
		var err error
		if c.Token, err = argument.Secret(file); err != nil {
			return Connection{}, fmt.Errorf("COPPICE_TOKEN_FILE: %w", err)
		}
	}
	if c.Server != "" && c.Token != "" {
		return c, nil
	}
	var saved Connection
	path, err := a.connectionFile()
	if err == nil {
		err = atomicfile.ReadJSON(path, &saved)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return Connection{}, err
	}
	if c.Server == "" {
		c.Server = saved.Server
	}
	if c.Server == "" {
		return Connection{}, errNoServer
	}
	if c.Token == "" && c.Server == saved.Server {
		c.Token = saved.Token
	}
	return c, nil
}

// SaveConnection writes the connection file, readable by the user only.
func (a *App) SaveConnection(c Connection) error {
	path, err := a.connectionFile()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return atomicfile.WriteJSON(path, c, 0o600)
}

// connectionFile is $COPPICE_CONNECTION, else coppice/connection.json in the user's configuration directory.
func (a *App) connectionFile() (string, error) {
	if path := a.Getenv("COPPICE_CONNECTION"); path != "" {
		return path, nil
	}
	dir := a.Getenv("XDG_CONFIG_HOME")
	if dir == "" {
		home := a.Getenv("HOME")
		if home == "" {
			return "", fmt.Errorf("no HOME: %w", os.ErrNotExist)
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "coppice", "connection.json"), nil
}
