//go:build linux

// Command servercost measures what being watched costs a server: processor time
// per request with the kernel side on, against the same server with it off, in
// alternating rounds. It prints one JSON object.
//
// The processor time is the kernel's own account of the server's threads
// (/proc/PID/task/TID/schedstat), so it holds the programs that run in their
// context and not what the reader of the records uses.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/target"
)

const (
	serveEnv = "EBPFLLM_SERVERCOST_SERVE"
	request  = "POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n" +
		"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nContent-Length: 2\r\n\r\n{}"
)

func main() {
	if kind, addr, ok := strings.Cut(os.Getenv(serveEnv), "="); ok {
		fail(serve(kind, addr))
		return
	}
	rounds := flag.Int("rounds", 20, "rounds of each mode")
	requests := flag.Int("requests", 10000, "requests a round")
	flag.Parse()
	if os.Geteuid() != 0 {
		fail(errors.New("must run as root: loads programs into the kernel"))
	}
	var result struct {
		Rows    []summary `json:"rows"`    // as `make bench` prints them
		Servers []row     `json:"servers"` // all that was measured
	}
	for _, kind := range []string{"echo", "net/http"} {
		rows, err := measure(kind, *rounds, *requests)
		fail(err)
		result.Servers = append(result.Servers, rows...)
		for _, r := range rows {
			result.Rows = append(result.Rows, r.summary())
		}
	}
	e := json.NewEncoder(os.Stdout)
	e.SetIndent("", " ")
	fail(e.Encode(result))
}

// row is one mode of one server, set against the mode "off" of the same round.
type row struct {
	Server string `json:"server"`
	Mode   string `json:"mode"`
	// medians over the rounds
	CPU float64 `json:"cpu_us_per_request"`
	P99 float64 `json:"p99_us"`
	// of the ratios round by round: median and quartiles
	CPURatio [3]float64 `json:"cpu_ratio_q25_q50_q75"`
	P99Ratio float64    `json:"p99_ratio"`
	Rounds   int        `json:"rounds"`
	Lost     uint64     `json:"lost_records"`
}

// summary is a row in the words of internal/bench: one value, and how many times
// less it is than without the kernel side.
type summary struct {
	Name    string  `json:"name"`
	Subject string  `json:"subject"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	RatioTo string  `json:"ratio_to,omitempty"`
	Ratio   float64 `json:"ratio,omitempty"`
	Note    string  `json:"note,omitempty"`
}

func (r row) summary() summary {
	s := summary{
		Name: "server's CPU per request, " + r.Server, Subject: "kernel side " + r.Mode,
		Value: r.CPU, Unit: "us", Note: fmt.Sprintf("p99 %.0f us", r.P99),
	}
	if r.Mode != "off" && r.CPURatio[1] > 0 {
		s.RatioTo, s.Ratio = "kernel side off", 1/r.CPURatio[1]
		s.Note = fmt.Sprintf("quartiles %.2f–%.2f × worse; p99 %.0f us, %.2f × worse", r.CPURatio[0], r.CPURatio[2], r.P99, r.P99Ratio)
	}
	return s
}

func measure(kind string, rounds, requests int) ([]row, error) {
	cmd, addr, err := start(kind)
	if err != nil {
		return nil, err
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	pid := uint32(cmd.Process.Pid)
	proc := target.NewProc("/proc")
	process, err := proc.Process(pid)
	if err != nil {
		return nil, err
	}
	proc.Identify(&process)
	tracking := probe.Tracking{IsGo: process.Go.IsGo, GoOffset: process.Go.GOffset}

	threadStages := slices.DeleteFunc(stage.All(), func(s stage.Stage) bool { return s.Socket() || s == stage.Unattributed })
	modes := []*mode{{name: "off"}, {name: "tcp"}, {name: "all"}}
	if err := modes[1].load(append(threadStages, stage.AcceptQueue), addr); err != nil {
		return nil, err
	}
	defer modes[1].close()
	if err := modes[2].load(nil, addr); err != nil {
		return nil, err
	}
	defer modes[2].close()

	if _, err := ask(addr, requests); err != nil { // warms the server up
		return nil, err
	}
	for i := range rounds {
		for j := range modes {
			m := modes[(i+j)%len(modes)] // each mode comes first equally often
			if err := m.round(pid, tracking, addr, requests); err != nil {
				return nil, fmt.Errorf("%s, %s: %w", kind, m.name, err)
			}
		}
	}
	var rows []row
	for _, m := range modes {
		r := row{Server: kind, Mode: m.name, CPU: quantile(m.cpu, 0.5), P99: quantile(m.p99, 0.5), Rounds: rounds}
		cpu, p99 := ratios(m.cpu, modes[0].cpu), ratios(m.p99, modes[0].p99)
		r.CPURatio = [3]float64{quantile(cpu, 0.25), quantile(cpu, 0.5), quantile(cpu, 0.75)}
		r.P99Ratio = quantile(p99, 0.5)
		if m.probe != nil {
			c, err := m.probe.Counters()
			if err != nil {
				return nil, err
			}
			for _, n := range c.Lost {
				r.Lost += n
			}
			if m.finished == 0 {
				return nil, fmt.Errorf("%s, %s: no request was seen", kind, m.name)
			}
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// mode is a way to watch, or not to.
type mode struct {
	name     string
	probe    *probe.Probe
	close    func()
	finished int
	cpu, p99 []float64 // µs, by round
}

func (m *mode) load(disabled []stage.Stage, addr string) error {
	p, err := probe.New(probe.Config{RingBytes: 8 << 20, MinDuration: time.Millisecond, Disabled: disabled}, zap.NewNop())
	if err != nil {
		return err
	}
	tcp, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		return err
	}
	var netns syscall.Stat_t
	if err := syscall.Stat("/proc/self/ns/net", &netns); err != nil {
		return err
	}
	if err := p.AddPort(uint32(netns.Ino), uint16(tcp.Port)); err != nil {
		return err
	}
	a := assemble.New(assemble.Config{MinDuration: int64(time.Millisecond), Unavailable: p.Unavailable()}, m)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.Run(ctx, a.Handle) }()
	m.probe = p
	m.close = func() {
		cancel()
		fail(errors.Join(<-done, p.Close()))
	}
	return nil
}

func (m *mode) Begin(*assemble.Request)         {}
func (m *mode) Occurrence(*assemble.Occurrence) {}
func (m *mode) Finish(*assemble.Request)        { m.finished++ }

func (m *mode) round(pid uint32, t probe.Tracking, addr string, requests int) error {
	if m.probe != nil {
		if err := m.probe.Track(pid, t); err != nil {
			return err
		}
	}
	if _, err := ask(addr, requests/20); err != nil {
		return err
	}
	before, err := cpuTime(pid)
	if err != nil {
		return err
	}
	latencies, err := ask(addr, requests)
	if err != nil {
		return err
	}
	after, err := cpuTime(pid)
	if err != nil {
		return err
	}
	m.cpu = append(m.cpu, float64(after-before)/1e3/float64(len(latencies)))
	m.p99 = append(m.p99, quantile(latencies, 0.99))
	if m.probe != nil {
		return m.probe.Untrack(pid)
	}
	return nil
}

// ask puts requests on one connection, one after the other, and returns how long
// each took in µs. With more connections the server would find several requests
// at each wake-up, the more the slower it is, and the figure would say more of
// that than of the requests.
func ask(addr string, requests int) ([]float64, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	latencies := make([]float64, 0, requests)
	for range requests {
		begin := time.Now()
		if _, err := io.WriteString(conn, request); err != nil {
			return nil, err
		}
		r, err := http.ReadResponse(in, nil)
		if err != nil {
			return nil, err
		}
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return nil, err
		}
		if err := r.Body.Close(); err != nil {
			return nil, err
		}
		latencies = append(latencies, float64(time.Since(begin).Nanoseconds())/1e3)
	}
	return latencies, nil
}

// cpuTime is the time that the threads of a process have run, in nanoseconds.
func cpuTime(pid uint32) (uint64, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(files) == 0 {
		return 0, fmt.Errorf("no threads of process %d: %w", pid, err)
	}
	var sum uint64
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return 0, err
		}
		field, _, _ := strings.Cut(string(b), " ")
		ns, err := strconv.ParseUint(field, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += ns
	}
	return sum, nil
}

func start(kind string) (*exec.Cmd, string, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, "", err
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		return nil, "", err
	}
	cmd := exec.Command("/proc/self/exe")
	// one thread at a time, so that threads that look for work do not blur the figure
	cmd.Env = append(os.Environ(), serveEnv+"="+kind+"="+addr, "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return nil, "", fmt.Errorf("the server %s did not come up: %w", kind, err)
	}
	return cmd, addr, nil
}

// serve answers at once: the worst case, in which there is nothing but the
// path that is watched.
func serve(kind, addr string) error {
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	if kind == "net/http" {
		return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(w, "{}")
		}))
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			in := make([]byte, 4096)
			for {
				if n, err := conn.Read(in); n == 0 || err != nil {
					return
				}
				if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
					return
				}
			}
		}()
	}
}

func ratios(a, b []float64) []float64 {
	var list []float64
	for i := range a {
		list = append(list, a[i]/b[i])
	}
	return list
}

func quantile(v []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(v))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "servercost:", err)
		os.Exit(1)
	}
}
