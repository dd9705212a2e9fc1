import loky.process_executor, tqdm
import fifobatch.worker
