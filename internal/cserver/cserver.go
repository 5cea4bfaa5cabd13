// Package cserver builds small HTTP servers in C. One delays its requests in a
// known way by the path they ask for; the other one accepts, reads and writes in
// ways that are less common. The kernel tests and the truth lab run them: a
// program without a runtime does nothing that it was not told to. The paths are
// listed in src/server.c and src/faults.c, and in src/sockets.c.
package cserver

import (
	"embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed src/*.c
var source embed.FS

// Build compiles the server to the file out; it needs gcc, whose further flags
// may be given.
//
// The server is called with a port, the path of its FILE, and -loop for an event
// loop in place of a thread per connection. It prints "ready" when it listens.
func Build(out string, flags ...string) error { return build("server.c", out, flags) }

// BuildSockets compiles the server of many kinds of sockets to the file out; it
// needs gcc and the kernel's headers. How it is called stands in src/sockets.c.
func BuildSockets(out string) error { return build("sockets.c", out, nil) }

func build(name, out string, flags []string) error {
	dir, err := os.MkdirTemp("", "cserver-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, source); err != nil {
		return err
	}
	args := append([]string{"-O1", "-Wall", "-pthread", "-o", out}, flags...)
	b, err := exec.Command("gcc", append(args, filepath.Join(dir, "src", name))...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("compile the C server (apt-get install gcc libc6-dev linux-libc-dev): %w: %s", err, b)
	}
	return nil
}
