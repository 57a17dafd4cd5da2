package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
)

// monitor runs one command line of QEMU's human monitor. Any output of the command counts as an error.
func monitor(ctx context.Context, socket, line string) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })() // ends a read
	lines := bufio.NewScanner(c)
	if !lines.Scan() { // the greeting
		return fmt.Errorf("monitor: %w", lines.Err())
	}
	for _, command := range []map[string]any{
		{"execute": "qmp_capabilities"},
		{"execute": "human-monitor-command", "arguments": map[string]any{"command-line": line}},
	} {
		if err := json.NewEncoder(c).Encode(command); err != nil {
			return err
		}
		if err := answer(lines); err != nil {
			return fmt.Errorf("%s: %w", line, err)
		}
	}
	return nil
}

func answer(lines *bufio.Scanner) error {
	for lines.Scan() {
		var m struct {
			Return json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return err
		}
		var printed string
		switch {
		case m.Error != nil:
			return fmt.Errorf("the monitor refused: %s", m.Error.Desc)
		case m.Return == nil:
			continue // an event
		case json.Unmarshal(m.Return, &printed) == nil && strings.TrimSpace(printed) != "":
			return fmt.Errorf("the monitor said: %s", printed)
		}
		return nil
	}
	return fmt.Errorf("the monitor closed the connection: %w", lines.Err())
}
