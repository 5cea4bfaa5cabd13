package loadtest

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
)

// server is a program that answers the OpenAI chat API.
type server struct {
	Weights string // the model file, which it maps
	Lock    string // the file that each request locks with flock; "" if none
	URL     string
	cpu     int
	process *process
}

// buildServer compiles the example server into dir.
func buildServer(ctx context.Context, dir string) (path string, err error) {
	path = filepath.Join(dir, "llmserver")
	build := exec.CommandContext(ctx, "go", "build", "-o", path, "github.com/ebpfllm/ebpfllm/examples/llmserver")
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the example server: %w\n%s", err, output)
	}
	return path, nil
}

// startServer starts a program that prints "listening on URL" when it is ready.
// Its threads share one CPU, but may be as many as on a larger machine: one that
// waits for the disk or a lock does not hold up the others.
func startServer(ctx context.Context, s server, dir string, env []string, path string, args ...string) (*server, error) {
	p, err := startProcess(filepath.Base(path), filepath.Join(dir, "server.log"), []int{s.cpu},
		append(env, "GOMAXPROCS=4"), path, args...)
	if err != nil {
		return nil, err
	}
	s.process = p
	// Other work on this machine should disturb the server as little as
	// possible: what it still does is in the kernel's record of the request.
	if err := favour(p.pid(), s.cpu); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	ready := func() (ok bool) { s.URL, ok = p.logLine("listening on "); return ok }
	if err := p.waitFor(ctx, "ready", ready); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	return &s, nil
}
