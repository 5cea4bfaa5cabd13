package scenarios

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/ebpfllm/ebpfllm/internal/stage"
	"github.com/ebpfllm/ebpfllm/internal/truthlab/lab"
)

// CommandOptions describe a case whose server or fault is an outside command.
type CommandOptions struct {
	Server  string // shell command that serves on 127.0.0.1:$PORT; the C server, a thread per connection, if ""
	Fault   string // shell command that is a fault from outside
	Path    string // what requests ask for
	Slow    string // what affected requests ask for, without Fault
	Stage   string
	Control bool
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
		Name: "command", What: "an outside command", Server: threads,
		Stage: o.Stage, Control: o.Control,
		Normal: lab.Ask{Path: o.Path},
		Length: 60 * time.Millisecond,
	}
	if o.Server != "" {
		s.Server = lab.Server{Name: "command", Start: func(ctx context.Context, r *lab.Rig) error { return startCommand(ctx, r, o.Server) }}
	}
	if o.Slow != "" {
		s.Affected = lab.Ask{Path: o.Slow}
		return s, nil
	}
	s.Inject = func(ctx context.Context, r *lab.Rig, d time.Duration) error { return disturbBy(ctx, r, d, o.Fault) }
	return s, nil
}

func startCommand(ctx context.Context, r *lab.Rig, command string) error {
	port, err := lab.FreePort()
	if err != nil {
		return err
	}
	// exec, so that the process that is watched and ended is the server itself
	p, err := r.Spawn([]string{"PORT=" + strconv.Itoa(port)}, "/bin/sh", "-c", "exec "+command)
	if err != nil {
		return err
	}
	r.Addr, r.PIDs = fmt.Sprintf("127.0.0.1:%d", port), []int{p.PID()}
	return r.WaitUntilUp(ctx, p)
}

// disturbBy runs a command that disturbs the server.
func disturbBy(ctx context.Context, r *lab.Rig, d time.Duration, command string) error {
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	var pids []string
	for _, pid := range r.PIDs {
		pids = append(pids, strconv.Itoa(pid))
	}
	cmd.Env = append(os.Environ(),
		"FAULT_MS="+strconv.FormatInt(d.Milliseconds(), 10),
		"SERVER_PIDS="+strings.Join(pids, " "),
		"SERVER_CPU="+strconv.Itoa(r.CPU),
		"SERVER_ADDR="+r.Addr)
	if b, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, b)
	}
	return nil
}
