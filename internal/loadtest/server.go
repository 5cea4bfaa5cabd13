package loadtest

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpfllm/ebpfllm/internal/llamacpp"
	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// The servers that can be put under load.
const (
	LLMServer = "llmserver" // examples/llmserver
	LlamaCPP  = "llamacpp"  // examples/llamacpp: the real llama.cpp on a generated model
)

// program is a server to start. Each prints "listening on URL" when it is ready.
type program struct {
	path    string
	args    []string
	weights string // the model file, which it maps
	lock    string // the file that each request locks with flock; "" if none
	size    int    // words and tokens of a typical request
}

// faultsOf are the faults that a server can suffer.
func faultsOf(server string) []stage.Stage {
	return slices.DeleteFunc(Kinds(), func(s stage.Stage) bool { return s == stage.Lock && server == LlamaCPP })
}

// build compiles a server and makes its model; dir is for files of this run.
func build(ctx context.Context, server, dir string) (program, error) {
	switch server {
	case LLMServer:
		path := filepath.Join(dir, "llmserver")
		return program{
			path: path, args: []string{"-dir", dir}, size: 16,
			weights: filepath.Join(dir, "weights.bin"), lock: filepath.Join(dir, "slot.lock"),
		}, command(ctx, "go", "build", "-o", path, "github.com/ebpfllm/ebpfllm/examples/llmserver")
	case LlamaCPP:
		s, err := llamacpp.Build(ctx)
		return program{path: s.Path, args: s.Args, weights: s.Model, size: 4}, err
	}
	return program{}, fmt.Errorf("no server %q: choose from %s, %s", server, LLMServer, LlamaCPP)
}

// command runs a command to its end; its output is part of the error.
func command(ctx context.Context, name string, args ...string) error {
	if output, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, output)
	}
	return nil
}

// server is a running program.
type server struct {
	program
	url     string
	cpu     int
	process *process.Process
}

// startServer starts a program at an address, on one CPU. It may have as many running threads
// as on a larger machine, though: one that waits for the disk or a lock does not
// hold up the others.
func startServer(ctx context.Context, p program, address string, cpu int, logs string, env []string, args ...string) (*server, error) {
	args = append(append([]string{"-listen", address}, p.args...), args...)
	child, err := process.Start(filepath.Base(p.path), filepath.Join(logs, "server.log"), []int{cpu}, append(env, "GOMAXPROCS=4"), p.path, args...)
	if err != nil {
		return nil, err
	}
	// Other work on this machine should disturb the server as little as
	// possible: what it still does is in the kernel's record of the request.
	s := &server{program: p, cpu: cpu, process: child}
	err = process.Favour(child.PID(), cpu)
	if err == nil {
		err = child.WaitFor(ctx, "ready", func() (ok bool) { s.url, ok = child.LogLine("listening on "); return ok })
	}
	if err != nil {
		child.Abandon()
		return nil, err
	}
	return s, nil
}
