//go:build linux

package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/llamacpp"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/target"
)

// An answer of the LLM server takes as long as this many of the echo server, and more.
const llmShare = 1000

// Tokens of its answers, and of the one before them that warms it up.
const llmTokens, llmWarmUp = 64, 8

// The CPU of the server, and that of all the rest; the same one where there is no other.
var (
	hostCPUs  = runtime.NumCPU()
	serverCPU = max(hostCPUs-1, 0)
	clientCPU = max(hostCPUs-2, 0)
)

// server is a process that is asked.
type server struct {
	cmd      *exec.Cmd
	addr     string
	program  string // the echo program, which is its client too
	tracking probe.Tracking
}

func (s *server) pid() uint32 { return uint32(s.cmd.Process.Pid) }

func (s *server) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

//go:embed echo/echo.c
var echoSource []byte

// startEcho compiles and starts the worst case on a CPU.
func startEcho(ctx context.Context, dir string, cpu int) (*server, error) {
	program := filepath.Join(dir, "echo")
	if _, err := os.Stat(program); err != nil {
		source := program + ".c"
		if err := os.WriteFile(source, echoSource, 0o600); err != nil {
			return nil, err
		}
		if b, err := exec.CommandContext(ctx, "gcc", "-O2", "-Wall", "-pthread", "-o", program, source).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("compile the echo server with gcc: %w: %s", err, b)
		}
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().(*net.TCPAddr)
	if err := l.Close(); err != nil {
		return nil, err
	}
	s := &server{program: program, addr: addr.String(), cmd: exec.CommandContext(ctx, program, "serve", strconv.Itoa(addr.Port))}
	return s, s.start(cpu, "ready")
}

// startLLM builds and starts examples/llamacpp: the real llama.cpp on a
// generated model, in a Go server.
func startLLM(ctx context.Context, dir string) (*server, error) {
	program, err := llamacpp.Build(ctx)
	if err != nil {
		return nil, err
	}
	s := &server{cmd: exec.CommandContext(ctx, program.Path, append(program.Args, "-listen", "127.0.0.1:0", "-uninstrumented")...)}
	s.cmd.Dir = dir
	s.cmd.Env = append(os.Environ(), "GOMAXPROCS=4") // as on a larger machine
	if err := s.start(serverCPU, "listening on "); err != nil {
		return nil, err
	}
	proc := target.NewProc("/proc")
	p, err := proc.Process(s.pid())
	if err != nil {
		s.stop()
		return nil, err
	}
	proc.Identify(&p)
	s.tracking = probe.Tracking{IsGo: p.Go.IsGo, GoOffset: p.Go.GOffset}
	return s, nil
}

// start starts the process on a CPU and waits for the line that says it is
// ready, which may name its address.
func (s *server) start(cpu int, ready string) error {
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := startOn(s.cmd, cpu); err != nil {
		return err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil && !strings.HasPrefix(line, ready) {
		err = fmt.Errorf("it says %q", line)
	}
	if err != nil {
		s.stop()
		return fmt.Errorf("the server did not come up: %w", err)
	}
	if addr, ok := strings.CutPrefix(strings.TrimSpace(line), ready+"http://"); ok {
		s.addr = addr
	}
	return nil
}

// startOn starts a command on a CPU: it inherits that of the thread.
func startOn(cmd *exec.Cmd, cpu int) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // it ends with the goroutine
		var set unix.CPUSet
		set.Set(cpu)
		err := unix.SchedSetaffinity(0, &set)
		if err == nil {
			err = cmd.Start()
		}
		started <- err
	}()
	return <-started
}

// keepTo keeps this process to a CPU: each of its threads, and so those to come.
func keepTo(cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range threads {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			return err
		}
		if err := unix.SchedSetaffinity(tid, &set); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("keep to CPU %d: %w", cpu, err)
		}
	}
	return nil
}

// askEcho has the client ask. With beside, that server is asked every fourth
// time. If it is hot, the client is on the server's CPU.
func (s *server) askEcho(ctx context.Context, requests int, beside *server, hot bool) (r round, err error) {
	port := func(s *server) string { _, port, _ := net.SplitHostPort(s.addr); return port }
	args := []string{"ask", port(s), strconv.Itoa(requests)}
	if beside != nil {
		args = append(args, port(beside))
	}
	cmd := exec.CommandContext(ctx, s.program, args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return r, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	cpu := clientCPU
	if hot {
		cpu = serverCPU
	}
	if err := startOn(cmd, cpu); err != nil {
		return r, err
	}
	defer func() {
		// only now does it let go of the connection, and the server's thread end
		err = errors.Join(err, in.Close(), cmd.Wait())
	}()
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		return r, fmt.Errorf("the client did not come up: %w", err)
	}
	before, err := cpuTime(s.pid())
	if err != nil {
		return r, err
	}
	if _, err := in.Write([]byte{'g'}); err != nil {
		return r, err
	}
	latencies := make([]uint32, requests)
	if err := binary.Read(out, binary.NativeEndian, latencies); err != nil {
		return r, fmt.Errorf("read the latencies: %w", err)
	}
	after, err := cpuTime(s.pid())
	if err != nil {
		return r, err
	}
	us := make([]float64, requests)
	for i, ns := range latencies {
		us[i] = float64(ns) / 1e3
	}
	return round{cpu: float64(after-before) / 1e3 / float64(requests), p99: quantile(us, 0.99)}, nil
}

// askLLM asks for streamed answers, one after the other on one
// connection. Its latencies are the gaps between the chunks.
func (s *server) askLLM(ctx context.Context, requests int) (r round, err error) {
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport}
	var gaps []float64
	ask := func(tokens int) error {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":"tell me of the sea"}],"max_tokens":%d,"stream":true}`, tokens)
		q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.addr+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			return err
		}
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
		last := time.Now()
		answer, err := client.Do(q)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("the server answered %s", answer.Status)
		}
		chunks := 0
		for lines := bufio.NewScanner(answer.Body); ; {
			if !lines.Scan() {
				if lines.Err() == nil && chunks < tokens {
					return fmt.Errorf("the answer has %d chunks", chunks)
				}
				return lines.Err()
			}
			if strings.HasPrefix(lines.Text(), "data: ") {
				now := time.Now()
				gaps = append(gaps, float64(now.Sub(last).Nanoseconds())/1e3)
				last = now
				chunks++
			}
		}
	}
	if err := ask(llmWarmUp); err != nil { // warms the server up
		return r, err
	}
	gaps = gaps[:0]
	before, err := cpuTime(s.pid())
	if err != nil {
		return r, err
	}
	for range requests {
		if err := ask(llmTokens); err != nil {
			return r, err
		}
	}
	after, err := cpuTime(s.pid())
	if err != nil {
		return r, err
	}
	return round{cpu: float64(after-before) / 1e3 / float64(requests), p99: quantile(gaps, 0.99)}, nil
}
