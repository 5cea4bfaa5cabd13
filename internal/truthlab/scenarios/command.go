package scenarios

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

// CommandOptions describe a case whose server or fault is an outside command.
type CommandOptions struct {
	Server  string // shell command that serves on 127.0.0.1:$PORT; the C server, a thread per connection, if ""
	Fault   string // shell command that is a fault from outside
	Path    string // what requests ask for
	Slow    string // what affected requests ask for, without Fault
	Body    string // requests POST it, if it is not ""
	Stage   string
	Control bool
	Name    string // of the scenario in the report

	Serial, Go bool          // of Server, as in lab.Server
	Patience   time.Duration // how long Server may take until it is up
}

// Command makes a scenario of outside commands.
func Command(o CommandOptions) (lab.Scenario, error) {
	if _, ok := stage.Parse(o.Stage); !ok {
		return lab.Scenario{}, fmt.Errorf("-stage is %q: it must be one of %v", o.Stage, stage.All())
	}
	if (o.Fault == "") == (o.Slow == "") {
		return lab.Scenario{}, errors.New("needs either -fault-cmd, a fault from outside, or -slow, a path whose requests the server delays itself")
	}
	s := lab.Scenario{
		Name: o.Name, What: "an outside command", Server: threads,
		Stage: o.Stage, Control: o.Control,
		Normal: askFor(o.Path, o.Body),
		Length: 60 * time.Millisecond,
	}
	if o.Server != "" {
		s.Server = lab.Server{Name: "command", Serial: o.Serial, Go: o.Go, Start: func(ctx context.Context, r *lab.Rig) error {
			return startCommand(ctx, r, o.Server, o.Patience)
		}}
	}
	if o.Slow != "" {
		s.Affected = askFor(o.Slow, o.Body)
		return s, nil
	}
	s.Inject = func(ctx context.Context, r *lab.Rig, d time.Duration) error { return disturbBy(ctx, r, d, o.Fault) }
	return s, nil
}

func askFor(path, body string) lab.Ask {
	if body == "" {
		return lab.Ask{Path: path}
	}
	return lab.Ask{
		Method: "POST", Path: path, Length: int64(len(body)), Header: map[string]string{"Content-Type": "application/json"},
		Body: func() io.Reader { return strings.NewReader(body) },
	}
}

func startCommand(ctx context.Context, r *lab.Rig, command string, patience time.Duration) error {
	port, err := lab.FreePort()
	if err != nil {
		return err
	}
	p, err := r.Spawn([]string{"PORT=" + strconv.Itoa(port)}, "/bin/sh", "-c", command)
	if err != nil {
		return err
	}
	r.Addr = fmt.Sprintf("127.0.0.1:%d", port)
	if err := r.WaitUntilUp(ctx, p, patience); err != nil {
		return fmt.Errorf("-server-cmd has to serve on 127.0.0.1:$PORT, and must neither end nor leave its process group before it is ended: %w", err)
	}
	if r.PIDs, err = p.Group(); err != nil {
		return err
	}
	for _, pid := range r.PIDs { // children were born before their parent was favoured
		if err := process.Favour(pid, r.CPU); err != nil {
			return err
		}
	}
	return nil
}

// disturbBy runs a command that disturbs the server, with nothing of the lab's precedence.
// It is ended with its children if it takes much longer than it was told to.
func disturbBy(ctx context.Context, r *lab.Rig, d time.Duration, command string) error {
	var pids []string
	for _, pid := range r.PIDs {
		pids = append(pids, strconv.Itoa(pid))
	}
	p, err := process.StartApart("-fault-cmd", filepath.Join(r.Dir, "fault.log"), r.Others, []string{
		"FAULT_MS=" + strconv.FormatInt(d.Milliseconds(), 10),
		"SERVER_PIDS=" + strings.Join(pids, " "),
		"SERVER_CPU=" + strconv.Itoa(r.CPU),
		"SERVER_ADDR=" + r.Addr,
	}, "/bin/sh", "-c", command)
	if err != nil {
		return err
	}
	defer p.Abandon() // what it left running in the background
	limit := 10*d + 2*time.Second
	select {
	case <-p.Exited():
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(limit):
		return fmt.Errorf("-fault-cmd still ran after %v, and has to end after $FAULT_MS, which is %d: %s", limit, d.Milliseconds(), command)
	}
	if err := p.Err(); err != nil {
		return fmt.Errorf("-fault-cmd %s: %w: %s", command, err, p.Tail())
	}
	return nil
}
