// Package servers holds the truth lab's servers other than the plain C ones: those
// of other runtimes, those that nobody here wrote, and those that are two
// processes. Each suffers its faults by path; their sources, in src and goserver,
// say which.
//
// What the faults need is in Rig.Paths:
//
//	file     that read faults read and lock faults lock
//	weights  that the server (or its engine) has mapped and map faults touch
//	log      that Node appends to
//	code     Node's own executable, a copy that nobody else runs
package servers

import (
	"bufio"
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/llamacpp"
	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

//go:embed src
var sources embed.FS

// dataSize is the size of the file that is read and mapped, in bytes.
const dataSize = 64 << 20

// Go is net/http, with so many threads at most that run Go code.
func Go(threads int) lab.Server {
	name := "go"
	if threads == 1 {
		name = "go-1"
	}
	return lab.Server{Name: name, Go: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		program, err := buildGo(ctx)
		if err != nil {
			return err
		}
		data, err := makeData(rig)
		if err != nil {
			return err
		}
		return spawn(ctx, rig, []string{fmt.Sprintf("GOMAXPROCS=%d", threads)}, program, port, data, data)
	}}
}

// Asyncio is a server on asyncio's own streams.
func Asyncio() lab.Server {
	return lab.Server{Name: "asyncio", Serial: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		return startPython(ctx, rig, "asyncio_server.py")
	}}
}

// AsyncioEngine is the same with an engine process in Python, on a Unix socket.
func AsyncioEngine() lab.Server {
	return lab.Server{Name: "asyncio+engine", Serial: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		return startPython(ctx, rig, "asyncio_server.py", "engine")
	}}
}

// Uvicorn runs a Starlette application.
func Uvicorn() lab.Server {
	return lab.Server{Name: "uvicorn", Serial: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		python, err := findPython(ctx, "import uvicorn, starlette")
		if err != nil {
			return lab.Unavailable("needs uvicorn and starlette: apt-get install python3-uvicorn python3-starlette (%v)", err)
		}
		data, err := makeData(rig)
		if err != nil {
			return err
		}
		src, err := unpack(rig)
		if err != nil {
			return err
		}
		number, err := lab.FreePort()
		if err != nil {
			return err
		}
		p, err := rig.Spawn([]string{"TRUTHLAB_FILE=" + data, "TRUTHLAB_WEIGHTS=" + data},
			python, "-m", "uvicorn", "--app-dir", src, "--port", strconv.Itoa(number), "--no-access-log", "uvicorn_app:app")
		if err != nil {
			return err
		}
		rig.Addr, rig.PIDs = fmt.Sprintf("127.0.0.1:%d", number), []int{p.PID()}
		return rig.WaitUntilUp(ctx, p, lab.Patience)
	}}
}

// Node is Node's http module.
func Node() lab.Server {
	return lab.Server{Name: "node", Serial: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		node, err := exec.LookPath("node")
		if err != nil {
			return lab.Unavailable("needs Node: apt-get install nodejs (%v)", err)
		}
		data, err := makeData(rig)
		if err != nil {
			return err
		}
		src, err := unpack(rig)
		if err != nil {
			return err
		}
		// a copy: the code of one that others run too cannot be evicted
		rig.Paths["code"], rig.Paths["log"] = filepath.Join(rig.Dir, "node"), filepath.Join(rig.Dir, "node.lines")
		if err := command(ctx, "cp", "--dereference", node, rig.Paths["code"]); err != nil {
			return err
		}
		// Collections that share one CPU with their helper threads really wait
		// for it: that would be run_queue.
		if err := unix.Mkfifo(filepath.Join(rig.Dir, "fifo"), 0o600); err != nil {
			return err
		}
		return spawn(ctx, rig, nil, rig.Paths["code"], "--expose-gc", "--single-threaded-gc", filepath.Join(src, "server.js"), port, data, rig.Paths["log"], filepath.Join(rig.Dir, "fifo"))
	}}
}

// How the API of an Engine serves, and how it speaks to the engine process.
const (
	Loop    = "loop"    // one event loop
	Threads = "threads" // a thread for each connection

	Unix         = "unix" // a Unix socket
	SharedMemory = "shm"  // shared memory and futexes
)

// Engine is an API process and an engine process, in C.
func Engine(api, transport string) lab.Server {
	return lab.Server{Name: "engine-" + api + "-" + transport, Serial: api == Loop, Start: func(ctx context.Context, rig *lab.Rig) error {
		program, err := buildC(ctx, "engine.c")
		if err != nil {
			return err
		}
		data, err := makeData(rig)
		if err != nil {
			return err
		}
		return spawn(ctx, rig, nil, program, port, data, data, api, transport)
	}}
}

// LlamaCPP is examples/llamacpp on the real llama.cpp, with so many threads that
// compute. It has no faults of its own and answers POST /v1/chat/completions only.
func LlamaCPP(threads int) lab.Server {
	return lab.Server{Name: "llama.cpp", Go: true, Serial: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		program, err := llamacpp.Build(ctx)
		if errors.Is(err, llamacpp.ErrNoNPM) {
			return lab.Unavailable("%v", err)
		}
		if err != nil {
			return err
		}
		number, err := lab.FreePort()
		if err != nil {
			return err
		}
		rig.Addr, rig.Paths["weights"] = fmt.Sprintf("127.0.0.1:%d", number), program.Model
		p, err := rig.Spawn([]string{"GOMAXPROCS=4"}, program.Path,
			append(program.Args, "-listen", rig.Addr, "-threads", strconv.Itoa(threads), "-uninstrumented")...)
		if err != nil {
			return err
		}
		rig.PIDs = []int{p.PID()}
		_, err = ready(ctx, p, "listening on ")
		return err
	}}
}

// NodeLlamaCPP serves the same API and model by llama.cpp's binding for Node.
func NodeLlamaCPP() lab.Server {
	return lab.Server{Name: "node-llama.cpp", Serial: true, Start: func(ctx context.Context, rig *lab.Rig) error {
		node, err := exec.LookPath("node")
		if err != nil {
			return lab.Unavailable("needs Node: apt-get install nodejs (%v)", err)
		}
		program, err := llamacpp.Build(ctx) // it writes the model
		if err != nil && !errors.Is(err, llamacpp.ErrNoNPM) {
			return err
		}
		module := ""
		if err == nil {
			module, err = llamacpp.Binding(ctx)
		}
		if errors.Is(err, llamacpp.ErrNoNPM) {
			return lab.Unavailable("%v", err)
		}
		if err != nil {
			return err
		}
		src, err := unpack(rig)
		if err != nil {
			return err
		}
		rig.Paths["weights"] = program.Model
		return spawn(ctx, rig, nil, node, filepath.Join(src, "llama_server.mjs"), port, module, program.Model)
	}}
}

// port stands for the port in the arguments of spawn.
const port = "PORT"

// spawn starts a server that prints "ready PID…" once it listens.
func spawn(ctx context.Context, rig *lab.Rig, env []string, path string, args ...string) error {
	number, err := lab.FreePort()
	if err != nil {
		return err
	}
	for i := range args {
		if args[i] == port {
			args[i] = strconv.Itoa(number)
		}
	}
	p, err := rig.Spawn(env, path, args...)
	if err != nil {
		return err
	}
	line, err := ready(ctx, p, "ready ")
	if err != nil {
		return err
	}
	rig.Addr = fmt.Sprintf("127.0.0.1:%d", number)
	for field := range strings.FieldsSeq(line) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return fmt.Errorf("%s says it is ready as %q, not with its processes' numbers", path, line)
		}
		rig.PIDs = append(rig.PIDs, pid)
		// an engine was born before its parent was favoured
		if err := process.Favour(pid, rig.CPU); err != nil {
			return err
		}
	}
	return nil
}

// ready waits for a line of a program's output and returns what follows the prefix.
func ready(ctx context.Context, p *process.Process, prefix string) (line string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errors.New("30 s passed"))
	defer cancel()
	err = p.WaitFor(ctx, "ready", func() (ok bool) { line, ok = p.LogLine(prefix); return ok })
	return line, err
}

func startPython(ctx context.Context, rig *lab.Rig, script string, args ...string) error {
	python, err := findPython(ctx, "import asyncio")
	if err != nil {
		return lab.Unavailable("needs Python 3: apt-get install python3 (%v)", err)
	}
	data, err := makeData(rig)
	if err != nil {
		return err
	}
	src, err := unpack(rig)
	if err != nil {
		return err
	}
	return spawn(ctx, rig, nil, python, append([]string{filepath.Join(src, script), port, data, data}, args...)...)
}

// HoldWrites returns a function that keeps others from writing to a file for some
// time, as a long write of another process does, and returns once they are kept.
func HoldWrites(ctx context.Context, rig *lab.Rig, path string) (hold func(time.Duration) error, err error) {
	program, err := buildC(ctx, "holdinode.c")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program, path) // ends when its input does
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	rig.Cleanup(func() error { return errors.Join(in.Close(), cmd.Wait()) })
	lines := bufio.NewReader(out)
	expect := func(want string) error {
		line, err := lines.ReadString('\n')
		if err != nil || line != want+"\n" {
			return fmt.Errorf("%s said %q, not %q: %w", program, line, want, err)
		}
		return nil
	}
	return func(d time.Duration) error {
		if _, err := fmt.Fprintln(in, d.Milliseconds()); err != nil {
			return err
		}
		return expect("held")
	}, expect("ready")
}

// findPython returns an interpreter that can run a statement. The distribution's is
// asked first: its packages are the ones that were installed beside it.
func findPython(ctx context.Context, statement string) (path string, err error) {
	for _, name := range []string{"/usr/bin/python3", "python3"} {
		out, failed := exec.CommandContext(ctx, name, "-c", statement+"\nimport sys; print(sys.executable)").Output()
		if failed == nil {
			return strings.TrimSpace(string(out)), nil
		}
		err = errors.Join(err, fmt.Errorf("%s: %w", name, failed))
	}
	return "", err
}

// makeData writes the file that is read, locked and mapped. It is incompressible,
// so that no layer below makes holes of it.
func makeData(rig *lab.Rig) (path string, err error) {
	path = filepath.Join(rig.Dir, "data")
	rig.Paths["file"], rig.Paths["weights"] = path, path
	file, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	random := rand.NewChaCha8([32]byte{})
	block := make([]byte, 1<<20)
	for range dataSize / len(block) {
		_, _ = random.Read(block) // never fails
		if _, err := file.Write(block); err != nil {
			return "", err
		}
	}
	return path, file.Sync() // dirty pages cannot be evicted
}

// unpack writes the sources for an interpreter into the rig's directory.
func unpack(rig *lab.Rig) (dir string, err error) {
	return filepath.Join(rig.Dir, "src"), os.CopyFS(rig.Dir, sources)
}

// cacheDir is where built programs are kept from one run to the next.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "ebpfllm", "truthlab")
	return dir, os.MkdirAll(dir, 0o755)
}

// buildC compiles a source, unless it has been compiled as it is.
func buildC(ctx context.Context, name string) (program string, err error) {
	source, err := sources.ReadFile("src/" + name)
	if err != nil {
		return "", err
	}
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	program = filepath.Join(dir, fmt.Sprintf("%s-%.8x", strings.TrimSuffix(name, ".c"), sha256.Sum256(source)))
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		return "", lab.Unavailable("needs gcc: apt-get install gcc libc6-dev (%v)", err)
	}
	part := fmt.Sprintf("%s.%d", program, os.Getpid())
	compiler := exec.CommandContext(ctx, "gcc", "-O1", "-Wall", "-pthread", "-fopenmp", "-x", "c", "-o", part, "-")
	compiler.Stdin = strings.NewReader(string(source))
	if output, err := compiler.CombinedOutput(); err != nil {
		return "", fmt.Errorf("gcc %s: %w\n%s", name, err, output)
	}
	return program, os.Rename(part, program)
}

// buildGo compiles goserver.
func buildGo(ctx context.Context) (program string, err error) {
	dir, err := cacheDir()
	if err != nil {
		return "", err
	}
	program = filepath.Join(dir, "goserver")
	return program, command(ctx, "go", "build", "-o", program, "github.com/ebpfllm/ebpfllm/internal/truthlab/servers/goserver")
}

// command runs a command to its end; its output is part of the error.
func command(ctx context.Context, name string, args ...string) error {
	if output, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, output)
	}
	return nil
}
