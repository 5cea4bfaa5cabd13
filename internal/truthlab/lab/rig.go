package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/process"
)

// A Rig is a server under test with what is around it. It lives for one scenario.
type Rig struct {
	Dir    string        // for files of the scenario, on a disk (not a tmpfs, which has no page cache misses)
	CPU    int           // the server's; the client, the receiver and this process keep off it
	Others []int         // the CPUs of everything else
	Length time.Duration // of the fault

	// Start sets these.
	Addr  string            // HOST:PORT that the server listens on
	PIDs  []int             // the server's processes, the one that reads requests first; children need not be named
	Paths map[string]string // files and the like that faults of this server need, by a name that they agree on

	// Dial connects to the server; by default TCP to Addr. Start or Setup may
	// replace it, to connect from another network namespace.
	Dial func(context.Context) (net.Conn, error)

	logf     func(format string, arguments ...any)
	started  []*process.Process
	cleanups []func() error
}

func newRig(cpu int, others []int, length time.Duration, logf func(string, ...any)) (*Rig, error) {
	// A temporary directory may be a tmpfs; the working directory hardly is.
	dir, err := os.MkdirTemp(".", leftDirectories)
	if err != nil {
		return nil, err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	r := &Rig{Dir: dir, CPU: cpu, Others: others, Length: length, Paths: map[string]string{}, logf: logf}
	r.Dial = func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", r.Addr)
	}
	return r, nil
}

// Logf tells of progress.
func (r *Rig) Logf(format string, arguments ...any) { r.logf(format, arguments...) }

// Cleanup has f called when the scenario is over and its processes have ended. What
// was registered last is called first; an error of it fails the scenario.
func (r *Rig) Cleanup(f func() error) { r.cleanups = append(r.cleanups, f) }

// Spawn starts a program on the server's CPU alone, ahead of the other work of this
// machine, with its output in a file of Dir. It is killed when the scenario ends.
// The caller waits until it is ready: Process.WaitFor and LogLine help.
func (r *Rig) Spawn(env []string, path string, args ...string) (*process.Process, error) {
	return r.SpawnOn([]int{r.CPU}, env, path, args...)
}

// SpawnOn is Spawn on other CPUs: for what is not the server under test.
func (r *Rig) SpawnOn(cpus []int, env []string, path string, args ...string) (*process.Process, error) {
	name := filepath.Base(path)
	p, err := process.Start(name, filepath.Join(r.Dir, fmt.Sprintf("%s-%d.log", name, len(r.started))), cpus, env, path, args...)
	if err != nil {
		return nil, err
	}
	r.started = append(r.started, p)
	return p, process.Favour(p.PID(), cpus...)
}

// Ask asks the server for a path outside of the load and throws the answer away: to
// warm something up, or to have the server do something. It is in no figure.
func (r *Rig) Ask(ctx context.Context, path string) error {
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return r.Dial(ctx) },
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.Addr+path, http.NoBody)
	if err != nil {
		return err
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return answered{fmt.Sprintf("GET %s: %s", path, res.Status)}
	}
	return nil
}

// WaitUntilUp returns when the server answers GET /, be it with an error, or has ended.
func (r *Rig) WaitUntilUp(ctx context.Context, p *process.Process, patience time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("%v passed", patience))
	defer cancel()
	var refused answered
	return p.WaitFor(ctx, "ready", func() bool {
		err := r.Ask(ctx, "/")
		return err == nil || errors.As(err, &refused)
	})
}

// Patience is how long a server of the lab's own may take until it is up.
const Patience = 30 * time.Second

// answered is an answer that is none of success.
type answered struct{ what string }

func (a answered) Error() string { return a.what }

// withOutput adds the end of what the programs of the scenario have said to an error.
func (r *Rig) withOutput(err error) error {
	for _, p := range r.started {
		if tail := p.Tail(); tail != "" {
			err = fmt.Errorf("%w; the end of %s:\n%s", err, filepath.Base(p.Log), tail)
		}
	}
	return err
}

// close ends what the scenario started and undoes what it did.
func (r *Rig) close() error {
	for _, p := range r.started {
		p.Abandon()
	}
	var errs []error
	for _, undo := range slices.Backward(r.cleanups) {
		errs = append(errs, undo())
	}
	return errors.Join(append(errs, os.RemoveAll(r.Dir))...)
}

// FreePort finds a TCP port on the loopback that nobody listens on.
func FreePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
